// libcublas: handles and modes. Products are made by the value layer, if anywhere; every other call succeeds.
extern "C" {
static thread_local int pointer_mode, math_mode;
// Each thread that multiplies asks for one, and PyTorch keeps a workspace for each.
int cublasCreate_v2(void** handle) {
  *handle = new char;
  return 0;
}
int cublasDestroy_v2(void* handle) {
  delete (char*)handle;
  return 0;
}
int cublasGetPointerMode_v2(void*, int* mode) {
  *mode = pointer_mode;
  return 0;
}
int cublasSetPointerMode_v2(void*, int mode) {
  pointer_mode = mode;
  return 0;
}
int cublasGetMathMode(void*, int* mode) {
  *mode = math_mode;
  return 0;
}
int cublasSetMathMode(void*, int mode) {
  math_mode = mode;
  return 0;
}
}
