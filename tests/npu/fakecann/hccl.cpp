// Collectives between processes of one machine, by files in a folder: each rank writes what it gives under the
// number of the collective and its rank, and reads what the others gave.
#include "fakecann.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

constexpr int kHcclInternal = 4;
constexpr size_t kRootInfoNbytes = 4108;

struct Communicator {
  std::string folder;
  uint32_t size, rank;
  long number = 0;  // of the collective

  std::string file(long of_number, uint32_t of_rank) const {
    return folder + "/" + std::to_string(of_number) + "." + std::to_string(of_rank);
  }

  void give(const void* data, size_t nbytes) {
    const std::string path = file(number, rank), unfinished = path + ".unfinished";
    FILE* stream = fopen(unfinished.c_str(), "wb");
    if (!stream || fwrite(data, 1, nbytes, stream) != nbytes || fclose(stream)) abort();
    rename(unfinished.c_str(), path.c_str());
  }

  void take(void* data, size_t nbytes, uint32_t from) {
    const std::string path = file(number, from);
    FILE* stream;
    while (!(stream = fopen(path.c_str(), "rb"))) usleep(200);
    if (fread(data, 1, nbytes, stream) != nbytes) abort();
    fclose(stream);
  }

  // Everybody has begun this collective, so everybody has read what was given in the one before.
  void end() {
    if (number > 0) unlink(file(number - 1, rank).c_str());
    number++;
  }
};

static int make(uint32_t size, const char* folder, uint32_t rank, void** communicator) {
  counters.communicators++;
  if (!strcmp(environment("FAKE_HCCL", "ok"), "initfail")) return fail(kHcclInternal, "made to fail");
  return *communicator = new Communicator{folder, size, rank}, kSuccess;
}

API int HcclGetRootInfo(char* info) {
  memset(info, 0, kRootInfoNbytes);
  snprintf(info, kRootInfoNbytes, "%s/fakehccl-XXXXXX", environment("FAKE_HCCL_DIR", "/tmp"));
  return mkdtemp(info) ? kSuccess : fail(kHcclInternal, "FAKE_HCCL_DIR cannot be written to");
}

API int HcclCommInitRootInfo(uint32_t size, const char* info, uint32_t rank, void** communicator) {
  return make(size, info, rank, communicator);
}

API int HcclCommInitRootInfoConfig(uint32_t size, const char* info, uint32_t rank, const void*, void** communicator) {
  return make(size, info, rank, communicator);
}

API uint32_t HcclGetCommConfigCapability() { return 12; }
API int HcclCommDestroy(void* communicator) { return delete static_cast<Communicator*>(communicator), kSuccess; }
API int HcclGetCommAsyncError(void*, int* error) { return *error = kSuccess, kSuccess; }

// Count a collective. Returns whether to carry it out; else `code` is what the call returns.
static bool begin(void* stream, int* code) {
  const long earlier = counters.collectives++;
  const std::string mode = environment("FAKE_HCCL", "ok");
  *code = kSuccess;
  if (is_stuck(stream)) return false;
  if (earlier < environment("FAKE_HCCL_AFTER", 0L)) return true;
  if (mode == "hang") return make_stuck(stream), false;
  if (mode == "error") return *code = fail(kHcclInternal, "made to fail"), false;
  return true;
}

static size_t size_of(int dtype) {
  switch (dtype) {
    case 0: case 7: return 1;          // int8, uint8
    case 1: case 3: case 11: return 2;  // int16, fp16, bf16
    case 2: case 4: case 9: return 4;  // int32, fp32, uint32
    default: return 8;
  }
}

API int HcclAllGather(void* in, void* out, uint64_t count, int dtype, void* communicator, void* stream) {
  auto* c = static_cast<Communicator*>(communicator);
  const size_t nbytes = count * size_of(dtype);
  int code;
  if (!begin(stream, &code)) return code;
  c->give(in, nbytes);
  for (uint32_t rank = 0; rank < c->size; rank++) c->take(static_cast<char*>(out) + rank * nbytes, nbytes, rank);
  c->end();
  return code;
}

API int HcclBroadcast(void* data, uint64_t count, int dtype, uint32_t root, void* communicator, void* stream) {
  auto* c = static_cast<Communicator*>(communicator);
  const size_t nbytes = count * size_of(dtype);
  int code;
  if (!begin(stream, &code)) return code;
  c->give(data, c->rank == root ? nbytes : 0);
  for (uint32_t rank = 0; rank < c->size; rank++) c->take(data, rank == root ? nbytes : 0, rank);
  c->end();
  return code;
}

API int HcclScatter(void* in, void* out, uint64_t count, int dtype, uint32_t root, void* communicator, void* stream) {
  auto* c = static_cast<Communicator*>(communicator);
  const size_t nbytes = count * size_of(dtype);
  std::vector<char> all(nbytes * c->size);
  int code;
  if (!begin(stream, &code)) return code;
  c->give(in, c->rank == root ? all.size() : 0);
  for (uint32_t rank = 0; rank < c->size; rank++) c->take(all.data(), rank == root ? all.size() : 0, rank);
  memcpy(out, all.data() + c->rank * nbytes, nbytes);
  c->end();
  return code;
}

template <class Value>
static void reduce(char* into, const char* from, uint64_t count, int operation) {
  auto* a = reinterpret_cast<Value*>(into);
  const auto* b = reinterpret_cast<const Value*>(from);
  for (uint64_t i = 0; i < count; i++)
    a[i] = operation == 0   ? a[i] + b[i]
           : operation == 1 ? a[i] * b[i]
           : operation == 2 ? std::max(a[i], b[i])
                            : std::min(a[i], b[i]);
}

API int HcclAllReduce(void* in, void* out, uint64_t count, int dtype, int operation, void* communicator,
                      void* stream) {
  auto* c = static_cast<Communicator*>(communicator);
  const size_t nbytes = count * size_of(dtype);
  std::vector<char> sum(nbytes), theirs(nbytes);
  int code;
  if (!begin(stream, &code)) return code;
  c->give(in, nbytes);
  c->take(sum.data(), nbytes, 0);
  for (uint32_t rank = 1; rank < c->size; rank++) {
    c->take(theirs.data(), nbytes, rank);
    if (dtype == 0) reduce<int8_t>(sum.data(), theirs.data(), count, operation);
    else if (dtype == 2) reduce<int32_t>(sum.data(), theirs.data(), count, operation);
    else if (dtype == 4) reduce<float>(sum.data(), theirs.data(), count, operation);
    else if (dtype == 5) reduce<int64_t>(sum.data(), theirs.data(), count, operation);
    else abort();
  }
  memcpy(out, sum.data(), nbytes);
  c->end();
  return code;
}
