/* What a module for a GPU asks of the driver, found when it is first needed: there is nothing to link, and a machine without
 * a driver gets a text that says so. */
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

typedef int driver_code; /* CUresult: 0 is success */
typedef uint64_t driver_address;

/* The functions by the names that the driver has them under, since CUDA 4 with these arguments. */
#define DRIVER_FUNCTIONS(F) \
  F(cuInit, (unsigned flags)) \
  F(cuDeviceGet, (int *device, int number)) \
  F(cuDevicePrimaryCtxRetain, (void **context, int device)) \
  F(cuDevicePrimaryCtxRelease_v2, (int device)) \
  F(cuCtxGetCurrent, (void **context)) \
  F(cuCtxSetCurrent, (void *context)) \
  F(cuGetErrorString, (driver_code code, const char **text)) \
  F(cuModuleLoadData, (void **module, const void *image)) \
  F(cuModuleUnload, (void *module)) \
  F(cuModuleGetFunction, (void **function, void *module, const char *name)) \
  F(cuFuncSetAttribute, (void *function, int attribute, int value)) \
  F(cuLaunchKernel, (void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y, \
                     unsigned block_z, unsigned shared, void *stream, void **arguments, void **extra)) \
  F(cuMemAlloc_v2, (driver_address * memory, size_t bytes)) \
  F(cuMemFree_v2, (driver_address memory)) \
  F(cuMemcpyHtoD_v2, (driver_address to, const void *from, size_t bytes)) \
  F(cuMemcpyDtoH_v2, (void *to, driver_address from, size_t bytes)) \
  F(cuMemsetD8Async, (driver_address memory, unsigned char value, size_t bytes, void *stream)) \
  F(cuStreamSynchronize, (void *stream))

typedef struct {
#define DRIVER_MEMBER(name, parameters) driver_code(*name) parameters;
  DRIVER_FUNCTIONS(DRIVER_MEMBER)
#undef DRIVER_MEMBER
} driver_functions;

enum { DRIVER_MAX_DYNAMIC_SHARED = 8, DRIVER_SHARED = 48 << 10 }; /* CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES; what needs no asking */

static driver_functions driver;
static const char *driver_missing; /* why there is none */
static char driver_text[256];

static void driver_find(void) {
  void *const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    const char *const why = dlerror();
    size_t i = 0;
    for (; why && why[i] && i + 1 < sizeof driver_text; i++) driver_text[i] = why[i];
    driver_text[i] = 0;
    driver_missing = driver_text;
    return;
  }
#define DRIVER_FIND(name, parameters) \
  *(void **)&driver.name = dlsym(library, #name); \
  if (!driver.name) driver_missing = "libcuda.so.1 has no " #name;
  DRIVER_FUNCTIONS(DRIVER_FIND)
#undef DRIVER_FIND
}

static pthread_once_t driver_once = PTHREAD_ONCE_INIT;
