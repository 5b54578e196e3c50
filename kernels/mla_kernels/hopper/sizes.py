"""Sizes that the plan and the kernels of the Hopper path agree on."""

TILE = 64  # rows of a tile: what one wgmma takes
BLOCK = 64  # keys of a block
D_V = 512
ROPE = 64  # columns of the key beyond the value
PANEL = 64  # columns that TMA fetches at once: 128 bytes, the swizzle

WARPS = 4  # of a warpgroup
CONSUMER_REGISTERS = 240  # of a thread; twice this and the producer's make 504, three warpgroups' share of 65,536
PRODUCER_REGISTERS = 24

GATHERERS = 2  # warpgroups that gather for the sparse kernel
GATHER_CONSUMER_REGISTERS = 192  # where two warpgroups gather; twice these two make 512, four warpgroups' share
GATHER_REGISTERS = 64
