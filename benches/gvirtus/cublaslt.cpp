// A function that PyTorch's libraries do not load without. It is linked into GVirtuS's libcublasLt.so.13.
#include <cublasLt.h>

extern "C" size_t cublasLtGetVersion() { return CUBLAS_VERSION; }
