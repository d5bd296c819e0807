// Devices, memory, streams and events.
#include "fakecann.h"

#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <thread>

Counters counters;

// Names of the counters, separated by spaces; their values go where `values` points, in that order.
API const char* fakecann_counters(long* values) {
  Counters& c = counters;
  for (const auto* counter : {&c.initializations, &c.allocations, &c.copies_to_device, &c.copies_to_host,
                              &c.copies_on_device, &c.kernels, &c.synchronizations, &c.communicators,
                              &c.collectives, &c.allocated_nbytes})
    *values++ = counter->load();
  return "initializations allocations copies_to_device copies_to_host copies_on_device kernels "
         "synchronizations communicators collectives allocated_nbytes";
}

const char* environment(const char* name, const char* otherwise) {
  const char* value = getenv(name);
  return value && *value ? value : otherwise;
}

long environment(const char* name, long otherwise) {
  const char* value = environment(name, "");
  return *value ? atol(value) : otherwise;
}

// ---- errors

static thread_local std::string latest_error;

int fail(int code, const char* text) {
  latest_error = std::string("[fake CANN] ") + text;
  return code;
}

API const char* aclGetRecentErrMsg() {
  static thread_local std::string handed_out;
  handed_out.swap(latest_error);
  latest_error.clear();
  return handed_out.c_str();
}

// ---- devices

static long num_devices() { return environment("FAKE_NPU_DEVICES", 0L); }
static thread_local int current_device = -1;
static int contexts[64];  // one for each device; only their addresses count

API int aclInit(const char*) { return counters.initializations++, kSuccess; }
API int aclrtGetDeviceCount(uint32_t* count) { return *count = num_devices(), kSuccess; }
API const char* aclrtGetSocName() { return "Ascend910B2"; }

API int aclrtSetDevice(int32_t device) {
  if (device < 0 || device >= num_devices()) return fail(kInvalidDevice, "there is no such device");
  return current_device = device, kSuccess;
}

API int aclrtGetDevice(int32_t* device) {
  if (current_device < 0) return fail(kNoContext, "this thread has set no device");
  return *device = current_device, kSuccess;
}

API int aclrtResetDevice(int32_t) { return current_device = -1, kSuccess; }

API int aclrtGetCurrentContext(void** context) {
  if (current_device < 0) return fail(kNoContext, "this thread has set no device");
  return *context = &contexts[current_device], kSuccess;
}

API int aclrtSetCurrentContext(void* context) {
  return current_device = static_cast<int>(static_cast<int*>(context) - contexts), kSuccess;
}

API int aclrtGetPrimaryCtxState(int32_t, uint32_t*, int32_t* active) { return *active = 1, kSuccess; }
API int aclGetDeviceCapability(uint32_t, int, int64_t* value) { return *value = 24, kSuccess; }
API int aclrtGetSysParamOpt(int, int64_t* value) { return *value = 0, kSuccess; }
API int aclrtDeviceCanAccessPeer(int32_t* can, int32_t, int32_t) { return *can = 1, kSuccess; }
API int aclrtDeviceGetBareTgid(int32_t* pid) { return *pid = getpid(), kSuccess; }
API int aclrtProcessReport(int32_t) { return usleep(1000), kSuccess; }

// ---- memory

constexpr size_t kDeviceNbytes = size_t{4} << 30;  // as reported; nothing enforces it
static std::mutex allocations_mutex;
static std::map<void*, size_t> allocations;

API int aclrtMalloc(void** address, size_t nbytes, int) {
  void* block = mmap(nullptr, nbytes ? nbytes : 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (block == MAP_FAILED) return fail(kOutOfMemory, "the host has no memory left");
  std::lock_guard<std::mutex> lock(allocations_mutex);
  allocations[block] = nbytes;
  counters.allocations++;
  counters.allocated_nbytes += static_cast<long>(nbytes);
  return *address = block, kSuccess;
}

API int aclrtMallocAlign32(void** address, size_t nbytes, int policy) { return aclrtMalloc(address, nbytes, policy); }

API int aclrtFree(void* address) {
  std::lock_guard<std::mutex> lock(allocations_mutex);
  auto found = allocations.find(address);
  if (found == allocations.end()) abort();
  counters.allocated_nbytes -= static_cast<long>(found->second);
  munmap(address, found->second ? found->second : 1);
  allocations.erase(found);
  return kSuccess;
}

API int aclrtMallocHost(void** address, size_t nbytes) {
  return posix_memalign(address, 4096, nbytes ? nbytes : 1) ? fail(kOutOfMemory, "no host memory") : kSuccess;
}

API int aclrtFreeHost(void* address) { return free(address), kSuccess; }
API int aclrtMemset(void* to, size_t, int32_t value, size_t nbytes) { return memset(to, value, nbytes), kSuccess; }

API int aclrtGetMemInfo(int, size_t* free, size_t* total) {
  *total = kDeviceNbytes;
  return *free = kDeviceNbytes - counters.allocated_nbytes, kSuccess;
}

static void count_copy(int kind) {
  (kind == 1 ? counters.copies_to_device : kind == 2 ? counters.copies_to_host : counters.copies_on_device)++;
}

API int aclrtMemcpy(void* to, size_t, const void* from, size_t nbytes, int kind) {
  count_copy(kind);
  return memmove(to, from, nbytes), kSuccess;
}

API int aclrtMemcpyAsync(void* to, size_t, const void* from, size_t nbytes, int kind, void* stream) {
  count_copy(kind);
  if (!is_stuck(stream)) memmove(to, from, nbytes);
  return kSuccess;
}

// ---- streams and events

struct Stream {
  std::atomic<bool> stuck{false};
};

struct Event {
  std::atomic<bool> stuck{false};
  std::chrono::steady_clock::time_point recorded;
};

static Stream default_stream;
static std::atomic<bool> any_stuck{false};

static Stream* stream_of(void* stream) { return stream ? static_cast<Stream*>(stream) : &default_stream; }
static Event* event_of(void* event) { return static_cast<Event*>(event); }

bool is_stuck(const void* stream) { return stream_of(const_cast<void*>(stream))->stuck; }
void make_stuck(void* stream) { stream_of(stream)->stuck = any_stuck = true; }

// Wait as a device would for work that may never end: without a timeout for ever.
static int synchronize(bool stuck, int32_t timeout_ms) {
  counters.synchronizations++;
  if (!stuck) return kSuccess;
  while (timeout_ms < 0) pause();
  std::this_thread::sleep_for(std::chrono::milliseconds(timeout_ms));
  return fail(kStreamTimeout, "a collective on this stream never completed");
}

API int aclrtCreateStream(void** stream) { return *stream = new Stream, kSuccess; }
API int aclrtCreateStreamWithConfig(void** stream, uint32_t, uint32_t) { return aclrtCreateStream(stream); }
API int aclrtDestroyStream(void*) { return kSuccess; }  // events and late calls may still refer to it
API int aclrtDestroyStreamForce(void*) { return kSuccess; }
API int aclrtStreamQuery(void* stream, int* status) { return *status = is_stuck(stream) ? 1 : 0, kSuccess; }
API int aclrtSynchronizeStream(void* stream) { return synchronize(is_stuck(stream), -1); }
API int aclrtSynchronizeStreamWithTimeout(void* stream, int32_t ms) { return synchronize(is_stuck(stream), ms); }
API int aclrtSynchronizeDevice() { return synchronize(any_stuck, -1); }
API int aclrtSynchronizeDeviceWithTimeout(int32_t ms) { return synchronize(any_stuck, ms); }

API int aclrtCreateEventWithFlag(void** event, uint32_t) { return *event = new Event, kSuccess; }
API int aclrtCreateEventExWithFlag(void** event, uint32_t flag) { return aclrtCreateEventWithFlag(event, flag); }
API int aclrtDestroyEvent(void* event) { return delete event_of(event), kSuccess; }
API int aclrtSynchronizeEvent(void* event) { return synchronize(event_of(event)->stuck, -1); }

API int aclrtRecordEvent(void* event, void* stream) {
  event_of(event)->stuck = is_stuck(stream);
  event_of(event)->recorded = std::chrono::steady_clock::now();
  return kSuccess;
}

API int aclrtResetEvent(void* event, void*) { return event_of(event)->stuck = false, kSuccess; }

API int aclrtStreamWaitEvent(void* stream, void* event) {
  if (event_of(event)->stuck) make_stuck(stream);
  return kSuccess;
}

API int aclrtQueryEventStatus(void* event, int* done) { return *done = event_of(event)->stuck ? 0 : 1, kSuccess; }
API int aclrtQueryEventWaitStatus(void* event, int* status) {
  return *status = event_of(event)->stuck ? 1 : 0, kSuccess;
}

API int aclrtEventElapsedTime(float* ms, void* from, void* to) {
  *ms = std::chrono::duration<float, std::milli>(event_of(to)->recorded - event_of(from)->recorded).count();
  return kSuccess;
}
