// A CUDA driver without a GPU, as far as Triton's launcher needs one: it notes each launch, byte by byte.

#include "cuda.h"
#include <stddef.h>
#include <string.h>

#define ANY(name, ...) CUresult name(__VA_ARGS__) { return CUDA_SUCCESS; }

static int num_params;
static size_t param_sizes[256];
static int fails;

static struct {
  int launches;
  size_t bytes;
  unsigned char data[16384];
} note;

// For tests: what the function's parameters are, which code a launch returns, and where the note of the last launch is.
void fake_set_params(int count, const size_t *sizes) {
  num_params = count;
  memcpy(param_sizes, sizes, count * sizeof(size_t));
}
void fake_fail(int code) { fails = code; }
void *fake_note(void) { return &note; }

ANY(cuInit, unsigned int flags)
ANY(cuCtxSetCurrent, CUcontext context)
ANY(cuFuncSetAttribute, CUfunction function, CUfunction_attribute attribute, int value)
ANY(cuFuncSetCacheConfig, CUfunction function, CUfunc_cache config)
ANY(cuModuleUnload, CUmodule module)
ANY(cuCtxSetLimit, CUlimit limit, size_t value)

CUresult cuGetErrorString(CUresult code, const char **text) { *text = "an error"; return CUDA_SUCCESS; }
CUresult cuGetErrorName(CUresult code, const char **text) { *text = "CUDA_ERROR_FAKE"; return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { *version = 13000; return CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *count) { *count = 0; return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { *device = ordinal; return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) { *device = 0; return CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *context) { *context = (CUcontext)8; return CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { *value = 0; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { *context = (CUcontext)8; return CUDA_SUCCESS; }
CUresult cuModuleLoadData(CUmodule *module, const void *image) { *module = (CUmodule)16; return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  *function = (CUfunction)0x7f1234567890;
  return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  *value = attribute == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN ? 232448
           : attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR        ? 9
                                                                              : 0;
  return CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  *(CUdeviceptr *)data = pointer;
  return CUDA_SUCCESS;
}
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}

// Bytes that depend on all that the real ones depend on.
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *shape, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *element_strides, CUtensorMapInterleave interleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  cuuint64_t *words = (cuuint64_t *)map;
  memset(map, 0, sizeof *map);
  words[0] = (cuuint64_t)address;
  words[1] = ~0ull;
  words[2] = type | (cuuint64_t)rank << 8 | (cuuint64_t)interleave << 16 | (cuuint64_t)swizzle << 24 |
             (cuuint64_t)promotion << 32 | (cuuint64_t)fill << 40;
  for (cuuint32_t i = 0; i < rank; i++) {
    words[3 + i] = shape[i];
    words[8 + i] = box[i] | (cuuint64_t)element_strides[i] << 32;
    words[13] = words[13] * 31 + (i + 1 < rank ? strides[i] : 0);
  }
  return CUDA_SUCCESS;
}

CUresult cuFuncGetParamInfo(CUfunction function, size_t index, size_t *offset, size_t *size) {
  if (index >= (size_t)num_params)
    return CUDA_ERROR_INVALID_VALUE;
  *offset = 0;
  *size = param_sizes[index];
  return CUDA_SUCCESS;
}

static void add(const void *data, size_t size) {
  memcpy(note.data + note.bytes, data, size);
  note.bytes += size;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **params, void **extra) {
  if (fails)
    return (CUresult)fails;
  note.launches++;
  note.bytes = 0;
  add(config, offsetof(CUlaunchConfig, hStream) - 4);  // without the hole before the stream
  add(&config->hStream, sizeof config->hStream);
  add(&config->numAttrs, sizeof config->numAttrs);
  for (unsigned int i = 0; i < config->numAttrs; i++) {
    add(&config->attrs[i].id, sizeof config->attrs[i].id);
    add(&config->attrs[i].value, sizeof(int));
  }
  add(&function, sizeof function);
  for (int i = 0; i < num_params; i++)
    add(params[i], param_sizes[i]);
  return extra ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
