// The operators that object collectives and the tests' state dicts need, on any strides, one element at a time.
#include "fakecann.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

using Sizes = std::vector<int64_t>;
using Number = long double;  // holds every int64, uint64 and double exactly

enum Dtype { FLOAT = 0, INT8 = 2, INT32 = 3, UINT8 = 4, INT16 = 6, INT64 = 9, DOUBLE = 11, BOOL = 12, BFLOAT16 = 27 };

struct Tensor {
  Sizes sizes, strides;
  int dtype;
  char* data;
};

struct Scalar {
  Number value;
};

struct IntArray {
  Sizes values;
};

struct TensorList {
  std::vector<const Tensor*> tensors;
};

// ---- elements

static size_t size_of(int dtype) {
  switch (dtype) {
    case INT8: case UINT8: case BOOL: return 1;
    case INT16: case BFLOAT16: return 2;
    case FLOAT: case INT32: return 4;
    case INT64: case DOUBLE: return 8;
  }
  fprintf(stderr, "[fake CANN] dtype %d is not handled\n", dtype);
  abort();
}

template <class Value>
static Number read_as(const char* at) {
  Value value;
  memcpy(&value, at, sizeof value);
  return value;
}

template <class Value>
static void write_as(char* at, Number number) {
  const auto value = static_cast<Value>(number);
  memcpy(at, &value, sizeof value);
}

static Number read(const char* at, int dtype) {
  switch (dtype) {
    case FLOAT: return read_as<float>(at);
    case DOUBLE: return read_as<double>(at);
    case INT8: return read_as<int8_t>(at);
    case INT16: return read_as<int16_t>(at);
    case INT32: return read_as<int32_t>(at);
    case INT64: return read_as<int64_t>(at);
    case BFLOAT16: {  // the upper half of a float
      char bytes[4] = {0, 0, at[0], at[1]};
      return read_as<float>(bytes);
    }
    default: return read_as<uint8_t>(at);
  }
}

static void write(char* at, int dtype, Number number) {
  switch (dtype) {
    case FLOAT: return write_as<float>(at, number);
    case DOUBLE: return write_as<double>(at, number);
    case INT8: return write_as<int8_t>(at, number);
    case INT16: return write_as<int16_t>(at, number);
    case INT32: return write_as<int32_t>(at, number);
    case INT64: return write_as<int64_t>(at, number);
    case BOOL: return write_as<uint8_t>(at, number != 0);
    case BFLOAT16: {
      char bytes[4];
      write_as<float>(bytes, number);
      memcpy(at, bytes + 2, 2);
      return;
    }
    default: return write_as<uint8_t>(at, number);
  }
}

static int64_t count_of(const Tensor& tensor) {
  int64_t count = 1;
  for (int64_t size : tensor.sizes) count *= size;
  return count;
}

static bool is_contiguous(const Tensor& tensor) {
  int64_t expected = 1;
  for (size_t dim = tensor.sizes.size(); dim-- > 0;) {
    if (tensor.sizes[dim] != 1 && tensor.strides[dim] != expected) return false;
    expected *= tensor.sizes[dim];
  }
  return true;
}

// The element of `tensor` for `index` into what it is broadcast to.
static char* element(const Tensor& tensor, const Sizes& index) {
  int64_t offset = 0;
  const size_t num_dims = tensor.sizes.size(), leading = index.size() - num_dims;
  for (size_t dim = 0; dim < num_dims; dim++)
    if (tensor.sizes[dim] != 1) offset += index[leading + dim] * tensor.strides[dim];
  return tensor.data + offset * static_cast<int64_t>(size_of(tensor.dtype));
}

static Number at(const Tensor& tensor, const Sizes& index) { return read(element(tensor, index), tensor.dtype); }

static void for_each(const Tensor& tensor, const std::function<void(const Sizes&)>& visit) {
  Sizes index(tensor.sizes.size());
  for (int64_t left = count_of(tensor); left > 0; left--) {
    visit(index);
    for (size_t dim = index.size(); dim-- > 0;) {
      if (++index[dim] < tensor.sizes[dim]) break;
      index[dim] = 0;
    }
  }
}

static void fill(const Tensor& out, const std::function<Number(const Sizes&)>& value) {
  for_each(out, [&](const Sizes& index) { write(element(out, index), out.dtype, value(index)); });
}

static void copy(const Tensor& out, const Tensor& from) {
  if (out.dtype == from.dtype && out.sizes == from.sizes && is_contiguous(out) && is_contiguous(from))
    memmove(out.data, from.data, count_of(out) * size_of(out.dtype));
  else
    fill(out, [&](const Sizes& index) { return at(from, index); });
}

// ---- what torch_npu builds arguments from

API Tensor* aclCreateTensor(const int64_t* sizes, uint64_t num_dims, int dtype, const int64_t* strides,
                            int64_t offset, int, const int64_t*, uint64_t, void* storage) {
  char* data = static_cast<char*>(storage) + offset * static_cast<int64_t>(size_of(dtype));
  return new Tensor{Sizes(sizes, sizes + num_dims), Sizes(strides, strides + num_dims), dtype, data};
}

API Scalar* aclCreateScalar(void* value, int dtype) { return new Scalar{read(static_cast<char*>(value), dtype)}; }
API IntArray* aclCreateIntArray(const int64_t* v, uint64_t count) { return new IntArray{Sizes(v, v + count)}; }

API TensorList* aclCreateTensorList(const Tensor* const* tensors, uint64_t count) {
  return new TensorList{{tensors, tensors + count}};
}

API int aclDestroyTensor(const Tensor* tensor) { return delete tensor, kSuccess; }
API int aclDestroyScalar(const Scalar* scalar) { return delete scalar, kSuccess; }
API int aclDestroyIntArray(const IntArray* array) { return delete array, kSuccess; }

API int aclDestroyTensorList(const TensorList* list) {
  for (const Tensor* tensor : list->tensors) delete tensor;
  return delete list, kSuccess;
}

// ---- operators: a first call hands over the arguments, a second one puts the task on a stream

using Task = std::function<void()>;

static int launch(Task* task, void* stream) {
  counters.kernels++;
  if (!is_stuck(stream)) (*task)();
  return delete task, kSuccess;
}

static int prepare(uint64_t* workspace_nbytes, Task** task, Task work) {
  *workspace_nbytes = 0;
  return *task = new Task(std::move(work)), kSuccess;
}

#define OPERATOR(name, ...)                                                                             \
  API int aclnn##name(void*, uint64_t, Task* task, void* stream) { return launch(task, stream); }       \
  API int aclnn##name##GetWorkspaceSize(__VA_ARGS__, uint64_t* workspace_nbytes, Task** task)
#define RUNS(...) prepare(workspace_nbytes, task, __VA_ARGS__)

OPERATOR(InplaceZero, const Tensor* out) {
  return RUNS([out = *out] { fill(out, [](const Sizes&) { return 0; }); });
}

OPERATOR(InplaceOne, const Tensor* out) {
  return RUNS([out = *out] { fill(out, [](const Sizes&) { return 1; }); });
}

OPERATOR(InplaceCopy, const Tensor* out, const Tensor* from) {
  return RUNS([out = *out, from = *from] { copy(out, from); });
}

OPERATOR(GtTensor, const Tensor* a, const Tensor* b, const Tensor* out) {
  return RUNS([a = *a, b = *b, out = *out] {
    fill(out, [&](const Sizes& index) { return at(a, index) > at(b, index); });
  });
}

static int add(const Tensor& a, const Tensor& b, Number alpha, const Tensor& out, uint64_t* workspace_nbytes,
               Task** task) {
  return RUNS([=] { fill(out, [&](const Sizes& index) { return at(a, index) + alpha * at(b, index); }); });
}

static int add(const Tensor& a, Number b, const Tensor& out, uint64_t* workspace_nbytes, Task** task) {
  return RUNS([=] { fill(out, [&](const Sizes& index) { return at(a, index) + b; }); });
}

OPERATOR(Add, const Tensor* a, const Tensor* b, const Scalar* alpha, const Tensor* out) {
  return add(*a, *b, alpha->value, *out, workspace_nbytes, task);
}

OPERATOR(InplaceAdd, const Tensor* a, const Tensor* b, const Scalar* alpha) {
  return add(*a, *b, alpha->value, *a, workspace_nbytes, task);
}

OPERATOR(Adds, const Tensor* a, const Scalar* b, const Scalar* alpha, const Tensor* out) {
  return add(*a, b->value * alpha->value, *out, workspace_nbytes, task);
}

OPERATOR(InplaceAdds, const Tensor* a, const Scalar* b, const Scalar* alpha) {
  return add(*a, b->value * alpha->value, *a, workspace_nbytes, task);
}

// Over all dimensions only, which leaves one element.
OPERATOR(ReduceSum, const Tensor* from, const IntArray*, bool, int, const Tensor* out) {
  if (count_of(*out) != 1) abort();
  return RUNS([from = *from, out = *out] {
    Number sum = 0;
    for_each(from, [&](const Sizes& index) { sum += at(from, index); });
    write(out.data, out.dtype, sum);
  });
}

OPERATOR(Cat, const TensorList* list, int64_t dim, const Tensor* out) {
  std::vector<Tensor> parts;
  for (const Tensor* tensor : list->tensors) parts.push_back(*tensor);
  return RUNS([parts, dim, out = *out] {
    const size_t along = dim < 0 ? dim + out.sizes.size() : dim;
    Tensor part = out;
    for (const Tensor& from : parts) {
      part.sizes = from.sizes;
      copy(part, from);
      part.data += from.sizes[along] * out.strides[along] * static_cast<int64_t>(size_of(out.dtype));
    }
  });
}

// `padding` has a number before and one after for each dimension, the last dimension first.
OPERATOR(ConstantPadNd, const Tensor* from, const IntArray* padding, const Scalar* value, const Tensor* out) {
  return RUNS([from = *from, padding = padding->values, value = value->value, out = *out] {
    Tensor inner = out;
    inner.sizes = from.sizes;
    for (size_t dim = 0; dim < out.sizes.size(); dim++) {
      const size_t pair = 2 * (out.sizes.size() - 1 - dim);
      if (pair < padding.size())
        inner.data += padding[pair] * out.strides[dim] * static_cast<int64_t>(size_of(out.dtype));
    }
    fill(out, [&](const Sizes&) { return value; });
    copy(inner, from);
  });
}
