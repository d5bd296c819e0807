// A stand-in for the CANN libraries that torch_npu is linked with: the "device" is host memory, work runs at once,
// and a collective can be told to hang. Names and signatures are what torch_npu asks for; no CANN header is used.
//
// Environment, read at each call unless said otherwise:
//   FAKE_NPU_DEVICES  devices there are; several processes may share one (default 0: no NPU)
//   FAKE_HCCL         ok (default), hang, error: what collectives do; initfail: communicators cannot be made
//   FAKE_HCCL_AFTER   how many collectives of this process succeed before FAKE_HCCL applies (default 0)
//   FAKE_HCCL_DIR     where ranks pass each other the bytes of collectives; nobody removes them (default /tmp)
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

// Calls across the boundary return 0 or one of CANN's error codes.
#define API extern "C" __attribute__((visibility("default")))

constexpr int kSuccess = 0;
constexpr int kInvalidDevice = 107001;
constexpr int kNoContext = 107002;
constexpr int kNotSupported = 207000;
constexpr int kOutOfMemory = 207001;
constexpr int kStreamTimeout = 507046;  // the field report's

// What reached the device in this process. The order is that of `fakecann_counters`.
struct Counters {
  std::atomic<long> initializations, allocations, copies_to_device, copies_to_host, copies_on_device, kernels,
      synchronizations, communicators, collectives, allocated_nbytes;
};
extern Counters counters;

const char* environment(const char* name, const char* otherwise);
long environment(const char* name, long otherwise);

// Keep the text for aclGetRecentErrMsg and return the code.
int fail(int code, const char* text);

// A stream is stuck once a hung collective was put on it; what comes later on it never runs. Events pass that on.
bool is_stuck(const void* stream);
void make_stuck(void* stream);
