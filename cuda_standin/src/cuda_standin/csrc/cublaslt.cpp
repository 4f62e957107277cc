// libcublasLt: descriptors are accepted, an algorithm is always found and asks for no workspace, products are not made.
#include <cstddef>
#include <cstdint>
#include <cstring>

struct Found {  // cublasLtMatmulHeuristicResult_t
  uint64_t algorithm[8];
  size_t workspace_bytes;
  int state;
  float waves;
  int reserved[4];
};
extern "C" {
static int some;
int cublasLtMatmulDescCreate(void** description, int, int) {
  *description = &some;
  return 0;
}
int cublasLtMatrixLayoutCreate(void** layout, int, uint64_t, uint64_t, int64_t) {
  *layout = &some;
  return 0;
}
int cublasLtMatmulPreferenceCreate(void** preference) {
  *preference = &some;
  return 0;
}
int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int asked, Found found[], int* n) {
  if (asked > 0) memset(found, 0, sizeof(Found));
  *n = asked > 0;
  return 0;
}
size_t cublasLtGetVersion() { return 130100; }
}
