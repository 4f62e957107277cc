// libnvrtc: every program compiles, to 256 bytes of nothing. Kernels do nothing anyway (erfinv, lgamma and others are
// made at run time).
#include <cstddef>
#include <cstring>
#include <map>
#include <string>

constexpr size_t SIZE = 256;
struct Program {
  std::map<std::string, std::string> names;
};
extern "C" {
int nvrtcVersion(int* major, int* minor) {
  *major = 12;
  *minor = 1;
  return 0;
}
int nvrtcGetNumSupportedArchs(int* n) {
  *n = 1;
  return 0;
}
int nvrtcGetSupportedArchs(int* architectures) {
  *architectures = 90;
  return 0;
}
const char* nvrtcGetErrorString(int) { return "error of the stand-in compiler"; }
int nvrtcCreateProgram(Program** p, const char*, const char*, int, const char* const*, const char* const*) {
  *p = new Program;
  return 0;
}
int nvrtcDestroyProgram(Program** p) {
  delete *p;
  *p = nullptr;
  return 0;
}
int nvrtcAddNameExpression(Program*, const char*) { return 0; }
int nvrtcCompileProgram(Program*, int, const char* const*) { return 0; }
static int size(size_t* n) {
  *n = SIZE;
  return 0;
}
static int nothing(char* image) {
  memset(image, 0, SIZE);
  return 0;
}
int nvrtcGetPTXSize(Program*, size_t* n) { return size(n); }
int nvrtcGetPTX(Program*, char* image) { return nothing(image); }
int nvrtcGetCUBINSize(Program*, size_t* n) { return size(n); }
int nvrtcGetCUBIN(Program*, char* image) { return nothing(image); }
int nvrtcGetProgramLogSize(Program*, size_t* n) {
  *n = 1;
  return 0;
}
int nvrtcGetProgramLog(Program*, char* text) {
  *text = 0;
  return 0;
}
int nvrtcGetLoweredName(Program* p, const char* expression, const char** name) {
  *name = (p->names[expression] = expression).c_str();
  return 0;
}
}
