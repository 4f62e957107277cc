// libcublas: handles and modes. Products are made by the value layer, if anywhere; every other call succeeds.
extern "C" {
static int the_handle;
static thread_local int pointer_mode, math_mode;
int cublasCreate_v2(void** handle) {
  *handle = &the_handle;
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
