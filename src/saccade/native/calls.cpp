// Repeats earlier calls from C++: look-up, allocation, launch and autograd take about 5 us of host time, while the same
// steps take 30 to 60 us in Python. Python describes a call once (`Memory.remember`); from then on `Memory.run` makes it.
// For whatever is new or unusual it returns None, and Python makes the call.
//
// No CUDA headers are used: the driver and the current stream are found by name, so this builds with any torch, even a CPU build.
#include <Python.h>

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/where.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/utils/object_ptr.h>

namespace {

using at::Tensor;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// --- the driver

struct Driver {
    int (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**) = nullptr;
    int (*encode)(void*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const uint32_t*, const uint32_t*, int, int, int, int) = nullptr;
    int (*current_stream)(int32_t, void**) = nullptr;  // torch's current stream of a device
    int (*context)(void**) = nullptr;
    int (*retain)(void**, int) = nullptr;
    int (*enter)(void*) = nullptr;

    void find() {
        if (void* cuda = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD)) {
            launch = reinterpret_cast<decltype(launch)>(dlsym(cuda, "cuLaunchKernel"));
            encode = reinterpret_cast<decltype(encode)>(dlsym(cuda, "cuTensorMapEncodeTiled"));
            context = reinterpret_cast<decltype(context)>(dlsym(cuda, "cuCtxGetCurrent"));
            retain = reinterpret_cast<decltype(retain)>(dlsym(cuda, "cuDevicePrimaryCtxRetain"));
            enter = reinterpret_cast<decltype(enter)>(dlsym(cuda, "cuCtxSetCurrent"));
        }
        current_stream = reinterpret_cast<decltype(current_stream)>(dlsym(RTLD_DEFAULT, "aoti_torch_get_current_cuda_stream"));
    }

    // a new thread, of autograd or of a user, has no context yet, and the driver cannot launch without one
    void make_current(int device) const {
        void* now = nullptr;
        if (!context || (context(&now) == 0 && now)) return;
        TORCH_CHECK(retain(&now, device) == 0 && enter(now) == 0, "no CUDA context for device ", device);
    }
} driver;

// --- launches

// The numbers of a ragged call that change from batch to batch, in the order of `saccade.native.described.Free`.
struct Ragged {
    enum { QUERIES, KEYS, SEQUENCES, LONGEST_Q, LONGEST_K, ROWS_OF_16_BYTES, COUNT };
    int64_t numbers[COUNT] = {};

    int64_t longest() const { return std::max(numbers[LONGEST_Q], numbers[LONGEST_K]); }
};

// One argument of a kernel: the address of a tensor plus an offset, or a number of up to eight bytes.
struct Argument {
    int slot;  // of the tensor; -1 for a number; -2 - i for number i of a ragged call, to which the value is added
    int64_t value;
};

// A tensor of 16-bit numbers as the copy engine of sm_90 sees it (`saccade.nvrtc.tensor_map`), contiguous dimension first. The driver encodes the
// map anew at each launch, since it holds the address.
struct Moved {
    Argument at;
    std::vector<int64_t> sizes;  // -2 - i for number i of a ragged call
    std::vector<uint64_t> strides;
    std::vector<uint32_t> box;

    void encode(int64_t address, const Ragged& ragged, void* into) const {
        constexpr int BFLOAT16 = 9, SWIZZLE_64 = 2, SWIZZLE_128 = 3, PROMOTE_L2_256 = 3;  // of the driver's enumerations
        const uint32_t ones[5] = {1, 1, 1, 1, 1};
        uint64_t extents[5];
        for (size_t i = 0; i < sizes.size(); ++i) extents[i] = static_cast<uint64_t>(sizes[i] < -1 ? ragged.numbers[-2 - sizes[i]] : sizes[i]);
        int status = driver.encode(into, BFLOAT16, static_cast<uint32_t>(sizes.size()), reinterpret_cast<void*>(address + at.value), extents,
                                   strides.data(), box.data(), ones, 0, box[0] == 64 ? SWIZZLE_128 : SWIZZLE_64, PROMOTE_L2_256, 0);
        TORCH_CHECK(status == 0, "the driver refuses a tensor map: error ", status);
    }
};

// The parameters of a kernel are its tensor maps, then its other arguments.
struct Launch {
    static constexpr int MOST = 96, MOST_MAPS = 8;
    void* function;
    unsigned grid[3];
    unsigned threads, shared_bytes;
    std::vector<Argument> arguments;
    std::vector<Moved> moved;
    int64_t per_sequence = 0;  // of a ragged call: no more blocks than this times its sequences

    unsigned blocks(const Ragged& ragged) const {
        if (!per_sequence) return grid[0];
        return static_cast<unsigned>(std::max<int64_t>(1, std::min<int64_t>(grid[0], per_sequence * ragged.numbers[Ragged::SEQUENCES])));
    }

    void enqueue(const std::vector<int64_t>& addresses, const Ragged& ragged, void* stream) const {
        alignas(64) char maps[MOST_MAPS][128];
        int64_t values[MOST];
        void* places[MOST_MAPS + MOST];
        int count = 0;
        for (const Moved& tensor : moved) {
            tensor.encode(addresses[tensor.at.slot], ragged, maps[count]);
            places[count] = maps[count];
            ++count;
        }
        for (const Argument& argument : arguments) {
            int64_t* value = &values[count - moved.size()];
            *value = argument.value;
            if (argument.slot >= 0) *value += addresses[argument.slot];
            else if (argument.slot < -1) *value += ragged.numbers[-2 - argument.slot];
            places[count++] = value;
        }
        int status = driver.launch(function, blocks(ragged), grid[1], grid[2], threads, 1, 1, shared_bytes, stream, places, nullptr);
        TORCH_CHECK(status == 0, "the driver refuses a launch: error ", status);
    }
};

void* stream_of(const at::Device& device) {
    void* stream = nullptr;
    int index = device.has_index() ? device.index() : 0;
    TORCH_CHECK(driver.current_stream(index, &stream) == 0, "torch has no current stream on device ", index);
    return stream;
}

// --- what a call is, without its data

struct Layout {
    std::vector<int64_t> sizes, strides;
    at::ScalarType dtype;

    Tensor allocate(const at::Device& device) const {
        return at::empty_strided(sizes, strides, at::TensorOptions().dtype(dtype).device(device));
    }
    // with another number of tokens, the first size
    Tensor allocate(int64_t tokens, const at::Device& device) const {
        std::vector<int64_t> mine = sizes;
        mine[0] = tokens;
        return at::empty_strided(mine, strides, at::TensorOptions().dtype(dtype).device(device));
    }
};

bool starts_at_16_bytes(const Tensor& tensor) { return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0; }

using Key = std::vector<int64_t>;

struct Hash {
    size_t operator()(const Key& key) const {
        uint64_t found = 1469598103934665603ull;
        for (int64_t part : key) found = (found ^ static_cast<uint64_t>(part)) * 1099511628211ull;
        return found ^ found >> 32;
    }
};

// ragged: without the number of its tokens or sequences, the first size
void describe(Key& key, const Tensor& tensor, bool ragged = false) {
    key.push_back(tensor.dim() | static_cast<int64_t>(tensor.scalar_type()) << 8 | (tensor.device().index() + 1) << 16 |
                  static_cast<int64_t>(tensor.device().type()) << 24 | static_cast<int64_t>(starts_at_16_bytes(tensor)) << 32 |
                  static_cast<int64_t>(at::GradMode::is_enabled() && tensor.requires_grad()) << 33);
    for (int64_t size : tensor.sizes().slice(ragged && tensor.dim() ? 1 : 0)) key.push_back(size);
    for (int64_t stride : tensor.strides()) key.push_back(stride);
}

// The launches of a backward call, and the bytes of each piece of memory that they share.
struct Planned {
    std::vector<Launch> launches;
    std::vector<int64_t> scratch, per_query;
    std::vector<int64_t> shares;  // (groups, Tq, Tk): the last gradient is the sum of what the launches leave in the first piece; else empty

    int64_t bytes(size_t piece, const Ragged& ragged) const {
        return scratch[piece] + (per_query.empty() ? 0 : per_query[piece] * ragged.numbers[Ragged::QUERIES]);
    }
};

// A prepared call. With `by_torch` torch's own function runs; otherwise our launches do, and the first `differentiable` inputs get gradients.
struct Call {
    bool by_torch = false, is_causal = false, grouped = false;
    double scale = 1.0, dropout = 0.0;  // of torch's function
    Tensor seen, hidden;  // the values that a boolean mask becomes for torch: 0 and -inf
    int inputs = 0, differentiable = 0;
    std::vector<Layout> saved;  // of the inputs, as forward saw them
    Layout out, lse;
    std::vector<Launch> forward;
    std::vector<Layout> gradients;
    bool transposed = false;  // out, and so its gradient, is [B, T, H, D]
    bool saves_out = false;   // backward needs it
    bool draws_seed = false;  // a Philox key of dropout, int64 [1] from torch's generator, behind out and lse
    int lengths = -1;         // which input holds the number of keys of each batch row
    int64_t keys = 0;         // the most that they may be
    bool ragged = false;      // packed tokens [T, H, D]: layouts hold for any number of tokens and sequences
    int64_t width = 0, most = 0, most_sequences = 0;  // of a ragged call: sequences times the longest times width are at most `most`
    std::vector<Layout> results;   // of a call of an op, which is below autograd: all that it returns
    std::vector<int64_t> scratch;  // and the bytes of each piece of memory that its launches share
    std::mutex mutex;
    std::unordered_map<Key, Planned, Hash> backward;  // by the layout of the incoming gradient
    PyObject* plan_backward = nullptr;                // `(*inputs, lse, dout, perhaps out, perhaps seed) -> gradients`, which may add to `backward`

    ~Call() {
        if (plan_backward && Py_IsInitialized()) {
            PyGILState_STATE state = PyGILState_Ensure();
            Py_DECREF(plan_backward);
            PyGILState_Release(state);
        }
    }
};

// --- autograd

// torch 2.13 keeps the reference count of a node inside the node, earlier versions outside it
using NodePointer = decltype(torch::autograd::Edge::function);

template <typename T, typename... Arguments>
auto make_node(Arguments&&... arguments) {
    if constexpr (std::is_same_v<NodePointer, std::shared_ptr<Node>>)
        return std::make_shared<T>(std::forward<Arguments>(arguments)...);
    else
        return c10::make_intrusive<T>(std::forward<Arguments>(arguments)...);
}

struct Python {  // holds the GIL
    PyGILState_STATE state = PyGILState_Ensure();
    ~Python() { PyGILState_Release(state); }
};

const char* NO_SECOND = "saccade's kernels have no second derivative; backend='reference' has one";

// The tensors of backward may have other addresses and layouts than those that forward saved: saved-tensor hooks may return copies.
Tensor as_it_lay(const Tensor& tensor, const Layout& layout, bool ragged) {
    TORCH_CHECK(tensor.scalar_type() == layout.dtype && tensor.dim() == static_cast<int64_t>(layout.sizes.size()),
                "a saved-tensor hook returned a tensor of another dtype or rank than it was given; it must return what it was given");
    if (tensor.strides() == at::IntArrayRef(layout.strides) && starts_at_16_bytes(tensor)) return tensor;
    return (ragged ? layout.allocate(tensor.size(0), tensor.device()) : layout.allocate(tensor.device())).copy_(tensor);
}

// The gradient of a bias, of which each program leaves a share, float32 [.., groups, Tq, Tk]: summed over the programs, and over queries or keys
// where the bias has one.
Tensor total(const Tensor& memory, const std::vector<int64_t>& shares, const Layout& wanted) {
    Tensor sum = memory.view(at::kFloat).view({-1, shares[0], shares[1], shares[2]}).sum(0);
    const int64_t queries = wanted.sizes.size() < 2 ? 1 : wanted.sizes[wanted.sizes.size() - 2], keys = wanted.sizes.empty() ? 1 : wanted.sizes.back();
    if (queries == 1 && shares[1] > 1) sum = sum.sum(1, true);
    if (keys == 1 && shares[2] > 1) sum = sum.sum(2, true);
    return sum.to(wanted.dtype).view(wanted.sizes);
}

struct Backward : Node {
    std::shared_ptr<Call> call;
    Ragged ragged;
    std::vector<SavedVariable> inputs;
    SavedVariable lse, out, seed;

    std::string name() const override { return "saccade::KnownAttentionBackward"; }

    void release_variables() override {
        std::lock_guard<std::mutex> lock(mutex_);
        for (SavedVariable& input : inputs) input.reset_data();
        lse.reset_data();
        out.reset_data();
        seed.reset_data();
    }

    variable_list apply(variable_list&& incoming) override {
        std::lock_guard<std::mutex> lock(mutex_);
        if (!incoming[0].defined()) return variable_list(call->gradients.size());
        variable_list found;
        {
            at::AutoGradMode no_grad(false);
            found = gradients(incoming[0]);
        }
        if (!at::GradMode::is_enabled()) return found;
        // a gradient of this gradient raises instead of silently being zero, for whichever source it is requested
        torch::autograd::edge_list sources;
        auto add = [&sources](const Tensor& source) {
            if (source.requires_grad()) sources.push_back(torch::autograd::impl::gradient_edge(source));
        };
        add(incoming[0]);
        for (const SavedVariable& input : inputs) add(input.unpack());
        if (sources.empty()) return found;
        auto refuse = make_node<torch::autograd::Error>(NO_SECOND, std::move(sources));
        for (Tensor& gradient : found) torch::autograd::set_history(gradient, NodePointer(refuse));
        return found;
    }

    variable_list gradients(Tensor dout) {
        std::vector<Tensor> tensors;
        for (size_t i = 0; i < inputs.size(); ++i) tensors.push_back(as_it_lay(inputs[i].unpack(), call->saved[i], call->ragged));
        tensors.push_back(lse.unpack());
        if (call->transposed) dout = dout.transpose(1, 2);
        if (dout.stride(-1) != 1 && dout.size(-1) != 1) dout = dout.contiguous();
        tensors.push_back(dout);
        if (call->saves_out) {
            Tensor saved = as_it_lay(out.unpack(), call->out, call->ragged);
            tensors.push_back(call->transposed ? saved.transpose(1, 2) : saved);
        }
        if (call->draws_seed) tensors.push_back(seed.unpack());
        Key key;
        describe(key, dout, call->ragged);
        const Planned* planned = nullptr;
        {
            std::lock_guard<std::mutex> lock(call->mutex);
            auto known = call->backward.find(key);
            if (known != call->backward.end()) planned = &known->second;  // nodes of an unordered_map keep their addresses
        }
        if (!planned) return by_python(tensors);
        at::Device device = dout.device();
        c10::DeviceGuard guard(device);
        if (device.is_cuda()) driver.make_current(device.index());
        variable_list found;
        for (size_t i = 0; i < call->gradients.size(); ++i) {
            const Layout& layout = call->gradients[i];
            const bool summed = !planned->shares.empty() && i + 1 == call->gradients.size();
            found.push_back(summed         ? at::empty({0}, at::TensorOptions().dtype(layout.dtype).device(device))
                            : call->ragged ? layout.allocate(tensors[i].size(0), device)
                                           : layout.allocate(device));
            tensors.push_back(found.back());
        }
        const size_t first_piece = tensors.size();
        for (size_t i = 0; i < planned->scratch.size(); ++i)
            tensors.push_back(at::empty({planned->bytes(i, ragged)}, at::TensorOptions().dtype(at::kByte).device(device)));
        std::vector<int64_t> addresses;
        for (const Tensor& tensor : tensors) addresses.push_back(reinterpret_cast<int64_t>(tensor.const_data_ptr()));
        void* stream = stream_of(device);
        for (const Launch& launch : planned->launches) launch.enqueue(addresses, ragged, stream);
        if (!planned->shares.empty()) found.back() = total(tensors[first_piece], planned->shares, call->gradients.back());
        return found;
    }

    variable_list by_python(const std::vector<Tensor>& tensors) {
        Python locked;
        const size_t count = tensors.size();
        THPObjectPtr arguments(PyTuple_New(static_cast<Py_ssize_t>(count + 2 * call->ragged)));
        for (size_t i = 0; i < count; ++i) PyTuple_SET_ITEM(arguments.get(), i, THPVariable_Wrap(tensors[i]));
        if (call->ragged) {
            PyTuple_SET_ITEM(arguments.get(), count, PyLong_FromLongLong(ragged.numbers[Ragged::LONGEST_Q]));
            PyTuple_SET_ITEM(arguments.get(), count + 1, PyLong_FromLongLong(ragged.numbers[Ragged::LONGEST_K]));
        }
        THPObjectPtr found(PyObject_CallObject(call->plan_backward, arguments.get()));
        if (!found) {
            python_error error;
            error.persist();
            throw std::move(error);
        }
        variable_list results;
        for (size_t i = 0; i < call->gradients.size(); ++i) results.push_back(THPVariable_Unpack(PyTuple_GetItem(found.get(), i)));
        return results;
    }
};

// torch's kernels read a misaligned incoming gradient without a check, so it is copied to aligned memory
Tensor aligned(const Tensor& gradient) {
    int64_t width = gradient.element_size();
    bool fits = starts_at_16_bytes(gradient);
    for (int64_t i = 0; i + 1 < gradient.dim(); ++i) fits &= gradient.size(i) <= 1 || gradient.stride(i) * width % 16 == 0;
    return fits && gradient.stride(-1) == 1 ? gradient : gradient.clone(at::MemoryFormat::Contiguous);
}

// --- Python's side

// Lengths whose values Python has found to lie in 0..keys. To look at them waits for the device, so they are known by the tensor and its version.
struct Checked {
    c10::weak_intrusive_ptr<c10::TensorImpl> tensor;  // keeps the address from being given to another tensor
    int64_t version, keys;
};

int64_t version_of(const Tensor& tensor) {
    return tensor.is_inference() ? -1 : static_cast<int64_t>(tensor.unsafeGetTensorImpl()->version_counter().current_version());
}

struct Memory {
    PyObject_HEAD
    std::unordered_map<Key, std::shared_ptr<Call>, Hash>* calls;
    std::vector<Checked>* checked;

    bool has_checked(const Tensor& lengths, int64_t keys) const {
        int64_t version = version_of(lengths);
        for (const Checked& one : *checked)
            if (one.tensor._unsafe_get_target() == lengths.unsafeGetTensorImpl() && one.version == version && one.keys == keys) return true;
        return false;
    }
};

// Whether the calls of this thread are traced, mapped over or modified in a way that Python has to handle.
bool somebody_watches() {
    using c10::DispatchKey;
    return c10::impl::TorchDispatchModeTLS::any_modes_set() || at::impl::torch_function_mode_enabled() ||
           c10::impl::tls_is_dispatch_key_included(DispatchKey::FuncTorchDynamicLayerFrontMode) ||
           c10::impl::tls_is_dispatch_key_included(DispatchKey::Tracer) || torch::autograd::ForwardADLevel::try_get_by_idx(0);
}

// Adds an option to the key; false for anything but a plain value. Numbers are compared by value and kind, names by their text.
bool describe_option(Key& key, PyObject* option) {
    int64_t value = 0, kind = 0;
    if (option == Py_None || option == Py_True || option == Py_False) {
        kind = option == Py_None ? 1 : option == Py_True ? 2 : 3;
    } else if (PyFloat_CheckExact(option)) {
        double number = PyFloat_AS_DOUBLE(option);
        std::memcpy(&value, &number, sizeof value);
        kind = 4;
    } else if (PyUnicode_CheckExact(option)) {
        Py_ssize_t size = 0;
        const char* text = PyUnicode_AsUTF8AndSize(option, &size);
        if (!text || size > 32) {
            PyErr_Clear();
            return false;
        }
        key.push_back(5 + 16 * size);
        for (Py_ssize_t done = 0; done < size; done += 8, value = 0) {
            std::memcpy(&value, text + done, static_cast<size_t>(std::min<Py_ssize_t>(8, size - done)));
            key.push_back(value);
        }
        return true;
    } else {
        return false;
    }
    key.push_back(kind);
    key.push_back(value);
    return true;
}

// The tensors of a call and its key; false where Python has to handle it. arguments: tensors and options in any order, a tensor first.
bool read_call(PyObject* const* arguments, Py_ssize_t count, std::vector<const Tensor*>& tensors, Key& key, bool& records, bool ragged = false) {
    if (count < 1 || !THPVariable_CheckExact(arguments[0]) || somebody_watches()) return false;
    bool needed = false;
    for (Py_ssize_t i = 0; i < count; ++i) {
        if (!THPVariable_CheckExact(arguments[i])) {
            if (!describe_option(key, arguments[i])) return false;
            continue;
        }
        const Tensor& tensor = THPVariable_Unpack(arguments[i]);
        if (tensor.layout() != at::kStrided || tensor.is_neg() || tensor.is_conj()) return false;
        if (tensor.is_meta() || (tensor.is_inference() && at::GradMode::is_enabled())) return false;
        describe(key, tensor, ragged);
        needed |= tensor.requires_grad();
        tensors.push_back(&tensor);
    }
    records = needed && at::GradMode::is_enabled();
    key.push_back(records);
    const at::Device device = tensors[0]->device();
    if (at::autocast::is_autocast_enabled(device.type())) {
        // Python would cast tensors of another dtype, but a remembered call is launched with the tensors as they were given
        at::ScalarType wanted = at::autocast::get_autocast_dtype(device.type());
        for (const Tensor* tensor : tensors)
            if (tensor->is_floating_point() && tensor->scalar_type() != wanted) return false;
    }
    return !device.is_cuda() || c10::impl::getDeviceGuardImpl(device.type())->getDevice() == device;
}

// A call of packed tokens: (longest of q, of k, query, key, value, cu_seqlens_q, cu_seqlens_k, options). Its key has no numbers of tokens or
// sequences, and of the longest ones the tile that holds them.
bool read_ragged(PyObject* const* arguments, Py_ssize_t count, std::vector<const Tensor*>& tensors, Key& key, bool& records, Ragged& ragged) {
    if (count < 7 || !PyLong_CheckExact(arguments[0]) || !PyLong_CheckExact(arguments[1])) return false;
    key.push_back(-1);  // unlike any other call
    if (!read_call(arguments + 2, count - 2, tensors, key, records, true) || tensors.size() != 5) return false;
    for (int i = 0; i < 5; ++i)
        if (tensors[i]->dim() != (i < 3 ? 3 : 1)) return false;
    const int64_t sequences = tensors[3]->size(0) - 1;
    if (tensors[1]->size(0) != tensors[2]->size(0) || tensors[4]->size(0) != sequences + 1) return false;
    const int64_t found[] = {tensors[0]->size(0), tensors[1]->size(0), sequences, PyLong_AsLongLong(arguments[0]), PyLong_AsLongLong(arguments[1])};
    PyErr_Clear();  // of a number beyond 64 bits, which is -1 here
    for (int i = 0; i < 5; ++i) {
        if (found[i] < 1 || found[i] >= int64_t(1) << 31) return false;
        ragged.numbers[i] = found[i];
    }
    ragged.numbers[Ragged::ROWS_OF_16_BYTES] = 16 * sequences;
    int64_t tile = 16;
    while (tile < ragged.longest()) tile *= 2;
    key.push_back(tile);
    key.push_back(tensors[3]->is_same(*tensors[4]));
    return true;
}

Tensor run_ours(const std::shared_ptr<Call>& call, const std::vector<const Tensor*>& tensors, bool records, const Ragged& ragged = {}) {
    RECORD_FUNCTION("saccade::KnownAttention", c10::ArrayRef<c10::IValue>{});  // a range while a profiler runs, else the look at a flag
    const at::Device device = tensors[0]->device();
    Tensor out, lse, seed;
    if (call->ragged) {
        out = call->out.allocate(tensors[0]->size(0), device);
        lse = at::empty({call->lse.sizes[0], tensors[0]->size(0)}, at::TensorOptions().dtype(call->lse.dtype).device(device));
    } else {
        out = call->out.allocate(device);
        lse = call->lse.allocate(device);
    }
    if (call->draws_seed) seed = at::randint(0, int64_t(1) << 62, {1}, at::TensorOptions().dtype(at::kLong).device(device));
    std::vector<int64_t> addresses;
    for (const Tensor* tensor : tensors) addresses.push_back(reinterpret_cast<int64_t>(tensor->const_data_ptr()));
    addresses.push_back(reinterpret_cast<int64_t>(out.const_data_ptr()));
    addresses.push_back(reinterpret_cast<int64_t>(lse.const_data_ptr()));
    if (seed.defined()) addresses.push_back(reinterpret_cast<int64_t>(seed.const_data_ptr()));
    if (device.is_cuda()) driver.make_current(device.index());
    void* stream = stream_of(device);
    for (const Launch& launch : call->forward) launch.enqueue(addresses, ragged, stream);
    if (!records) return out;
    auto node = make_node<Backward>();
    node->call = call;
    node->ragged = ragged;
    torch::autograd::edge_list edges;
    for (int i = 0; i < call->differentiable; ++i)
        edges.push_back(tensors[i]->requires_grad() ? torch::autograd::impl::gradient_edge(*tensors[i]) : torch::autograd::Edge());
    node->set_next_edges(std::move(edges));
    for (const Tensor* tensor : tensors) node->inputs.emplace_back(*tensor, false);
    node->lse = SavedVariable(lse, false);
    if (seed.defined()) node->seed = SavedVariable(seed, false);
    if (call->saves_out) {
        // the node must not own the tensor whose history it is; a copy of the header shares the version, so that changes in place are noticed
        c10::TensorImpl* header = out.unsafeGetTensorImpl();
        node->out = SavedVariable(Tensor(header->shallow_copy_and_detach(header->version_counter(), false)), false);
    }
    torch::autograd::set_history(out, NodePointer(node));
    return out;
}

PyObject* memory_run(Memory* self, PyObject* const* arguments, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    std::vector<const Tensor*> tensors;
    Key key;
    bool records = false;
    tensors.reserve(4);
    key.reserve(40);
    if (!read_call(arguments, count, tensors, key, records)) Py_RETURN_NONE;
    auto found = self->calls->find(key);
    if (found == self->calls->end()) Py_RETURN_NONE;
    std::shared_ptr<Call> call = found->second;
    if (call->lengths >= 0 && !self->has_checked(*tensors[call->lengths], call->keys)) Py_RETURN_NONE;
    if (!call->by_torch) return THPVariable_Wrap(run_ours(call, tensors, records));
    std::optional<Tensor> added;
    if (tensors.size() == 4) added = call->hidden.defined() ? at::where(*tensors[3], call->seen, call->hidden) : *tensors[3];
    Tensor out = at::scaled_dot_product_attention(*tensors[0], *tensors[1], *tensors[2], added, call->dropout, call->is_causal, call->scale, call->grouped);
    if (records) out.register_hook([](const Tensor& gradient) { return aligned(gradient); });
    return THPVariable_Wrap(out);
    END_HANDLE_TH_ERRORS
}

// compute(*call): the results of an op, as a tuple
PyObject* memory_compute(Memory* self, PyObject* const* arguments, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    std::vector<const Tensor*> given;
    Key key;
    bool records = false;
    given.reserve(9);
    key.reserve(96);
    if (!read_call(arguments, count, given, key, records)) Py_RETURN_NONE;
    auto found = self->calls->find(key);
    if (found == self->calls->end()) Py_RETURN_NONE;
    std::shared_ptr<Call> call = found->second;
    const at::Device device = given[0]->device();
    std::vector<Tensor> made;
    std::vector<int64_t> addresses;
    for (const Tensor* tensor : given) addresses.push_back(reinterpret_cast<int64_t>(tensor->const_data_ptr()));
    for (const Layout& layout : call->results) made.push_back(layout.allocate(device));
    for (int64_t bytes : call->scratch) made.push_back(at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device)));
    for (const Tensor& tensor : made) addresses.push_back(reinterpret_cast<int64_t>(tensor.const_data_ptr()));
    if (device.is_cuda()) driver.make_current(device.index());
    void* stream = stream_of(device);
    for (const Launch& launch : call->forward) launch.enqueue(addresses, {}, stream);
    THPObjectPtr results(PyTuple_New(static_cast<Py_ssize_t>(call->results.size())));
    for (size_t i = 0; i < call->results.size(); ++i) PyTuple_SET_ITEM(results.get(), i, THPVariable_Wrap(made[i]));
    return results.release();
    END_HANDLE_TH_ERRORS
}

// run_ragged(longest_q, longest_k, *call)
PyObject* memory_run_ragged(Memory* self, PyObject* const* arguments, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    std::vector<const Tensor*> tensors;
    Key key;
    bool records = false;
    Ragged ragged;
    tensors.reserve(5);
    key.reserve(56);
    if (!read_ragged(arguments, count, tensors, key, records, ragged)) Py_RETURN_NONE;
    auto found = self->calls->find(key);
    if (found == self->calls->end()) Py_RETURN_NONE;
    std::shared_ptr<Call> call = found->second;
    const int64_t sequences = ragged.numbers[Ragged::SEQUENCES];
    if (sequences > call->most_sequences || sequences * ragged.longest() * call->width > call->most) Py_RETURN_NONE;
    return THPVariable_Wrap(run_ours(call, tensors, records, ragged));
    END_HANDLE_TH_ERRORS
}

// --- descriptions from Python: tuples of numbers

std::vector<int64_t> numbers(PyObject* sequence) {
    THPObjectPtr fast(PySequence_Fast(sequence, "a sequence of whole numbers is expected"));
    if (!fast) throw python_error();
    std::vector<int64_t> found;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(fast.get()); ++i)
        found.push_back(PyLong_AsLongLong(PySequence_Fast_GET_ITEM(fast.get(), i)));
    if (PyErr_Occurred()) throw python_error();
    return found;
}

Layout layout_of(PyObject* tensor) {
    const Tensor& given = THPVariable_Unpack(tensor);
    return {given.sizes().vec(), given.strides().vec(), given.scalar_type()};
}

// (slot, offset, (sizes), (strides in bytes), (box)), the contiguous dimension last
Moved moved_of(PyObject* described) {
    TORCH_CHECK(PyTuple_Check(described) && PyTuple_GET_SIZE(described) == 5, "a moved tensor has five parts");
    auto sizes = numbers(PyTuple_GET_ITEM(described, 2)), strides = numbers(PyTuple_GET_ITEM(described, 3)), box = numbers(PyTuple_GET_ITEM(described, 4));
    TORCH_CHECK(sizes.size() <= 5 && sizes.size() == strides.size() + 1 && sizes.size() == box.size(), "a moved tensor has one stride less than sizes");
    Moved moved;
    moved.at = {static_cast<int>(PyLong_AsLong(PyTuple_GET_ITEM(described, 0))), PyLong_AsLongLong(PyTuple_GET_ITEM(described, 1))};
    moved.sizes.assign(sizes.rbegin(), sizes.rend());
    moved.strides.assign(strides.rbegin(), strides.rend());
    moved.box.assign(box.rbegin(), box.rend());
    return moved;
}

// (function, (grid x, y, z), threads, shared bytes, (slots), (values), (moved tensors), blocks per sequence or 0)
Launch launch_of(PyObject* described) {
    TORCH_CHECK(PyTuple_Check(described) && PyTuple_GET_SIZE(described) == 8, "a launch has eight parts");
    Launch launch;
    launch.function = PyLong_AsVoidPtr(PyTuple_GET_ITEM(described, 0));
    auto grid = numbers(PyTuple_GET_ITEM(described, 1));
    TORCH_CHECK(grid.size() == 3, "a grid has three extents");
    for (int i = 0; i < 3; ++i) launch.grid[i] = static_cast<unsigned>(grid[i]);
    launch.threads = PyLong_AsUnsignedLong(PyTuple_GET_ITEM(described, 2));
    launch.shared_bytes = PyLong_AsUnsignedLong(PyTuple_GET_ITEM(described, 3));
    auto slots = numbers(PyTuple_GET_ITEM(described, 4)), values = numbers(PyTuple_GET_ITEM(described, 5));
    TORCH_CHECK(slots.size() == values.size() && slots.size() <= Launch::MOST, "a launch has one value for each of at most 96 slots");
    for (size_t i = 0; i < slots.size(); ++i) launch.arguments.push_back({static_cast<int>(slots[i]), values[i]});
    PyObject* maps = PyTuple_GET_ITEM(described, 6);
    TORCH_CHECK(PyTuple_Check(maps) && PyTuple_GET_SIZE(maps) <= Launch::MOST_MAPS, "a launch moves at most 8 tensors");
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(maps); ++i) launch.moved.push_back(moved_of(PyTuple_GET_ITEM(maps, i)));
    TORCH_CHECK(launch.moved.empty() || driver.encode, "the driver has no tensor maps");
    launch.per_sequence = PyLong_AsLongLong(PyTuple_GET_ITEM(described, 7));
    for (const Argument& argument : launch.arguments) TORCH_CHECK(argument.slot >= -1 - Ragged::COUNT, "there is no number ", -2 - argument.slot);
    return launch;
}

std::vector<Launch> launches_of(PyObject* sequence) {
    std::vector<Launch> found;
    THPObjectPtr fast(PySequence_Fast(sequence, "a sequence of launches is expected"));
    if (!fast) throw python_error();
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(fast.get()); ++i)
        found.push_back(launch_of(PySequence_Fast_GET_ITEM(fast.get(), i)));
    return found;
}

void store(Memory* self, const Key& key, const std::shared_ptr<Call>& call) {
    if (self->calls->size() >= 4096) self->calls->clear();  // only a stream of ever new shapes gets here
    (*self->calls)[key] = call;
}

// A call as `remember` and `remember_ragged` are told of it: its tensors; behind the call itself out, lse, launches, gradients, plan_backward.
std::shared_ptr<Call> described(const std::vector<const Tensor*>& tensors, PyObject* const* arguments) {
    auto call = std::make_shared<Call>();
    call->inputs = static_cast<int>(tensors.size());
    for (const Tensor* tensor : tensors) call->saved.push_back({tensor->sizes().vec(), tensor->strides().vec(), tensor->scalar_type()});
    call->out = layout_of(arguments[1]);
    call->lse = layout_of(arguments[2]);
    call->forward = launches_of(arguments[3]);
    THPObjectPtr gradients(PySequence_Fast(arguments[4], "gradients is a sequence of tensors"));
    if (!gradients) throw python_error();
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(gradients.get()); ++i)
        call->gradients.push_back(layout_of(PySequence_Fast_GET_ITEM(gradients.get(), i)));
    call->differentiable = static_cast<int>(call->gradients.size());
    Py_INCREF(arguments[5]);
    call->plan_backward = arguments[5];
    return call;
}

// remember(call, out, lse, launches, gradients, plan_backward, form): False where C++ cannot make this call. form: whether out is transposed,
// whether backward needs it, whether a seed is drawn, the input that holds lengths or -1, and the most that they may be.
PyObject* memory_remember(Memory* self, PyObject* const* arguments, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK(count == 7 && PyTuple_Check(arguments[0]), "remember takes seven arguments, the call as a tuple first");
    std::vector<const Tensor*> tensors;
    Key key;
    bool records = false;
    if (!read_call(reinterpret_cast<PyTupleObject*>(arguments[0])->ob_item, PyTuple_GET_SIZE(arguments[0]), tensors, key, records))
        Py_RETURN_FALSE;
    std::shared_ptr<Call> call = described(tensors, arguments);
    auto form = numbers(arguments[6]);
    TORCH_CHECK(form.size() == 5 && form[3] < call->inputs, "a form has five parts: transposed, saves_out, draws_seed, lengths, keys");
    call->transposed = form[0];
    call->saves_out = form[1];
    call->draws_seed = form[2];
    call->lengths = static_cast<int>(form[3]);
    call->keys = form[4];
    store(self, key, call);
    Py_RETURN_TRUE;
    END_HANDLE_TH_ERRORS
}

// remember_op(call, results, launches, scratch): for `compute`; the results take the slots behind the tensors of the call, then comes scratch memory
PyObject* memory_remember_op(Memory* self, PyObject* const* arguments, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK(count == 4 && PyTuple_Check(arguments[0]), "remember_op takes four arguments, the call as a tuple first");
    std::vector<const Tensor*> tensors;
    Key key;
    bool records = false;
    if (!read_call(reinterpret_cast<PyTupleObject*>(arguments[0])->ob_item, PyTuple_GET_SIZE(arguments[0]), tensors, key, records))
        Py_RETURN_FALSE;
    auto call = std::make_shared<Call>();
    THPObjectPtr results(PySequence_Fast(arguments[1], "results is a sequence of tensors"));
    if (!results) throw python_error();
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(results.get()); ++i)
        call->results.push_back(layout_of(PySequence_Fast_GET_ITEM(results.get(), i)));
    call->forward = launches_of(arguments[2]);
    call->scratch = numbers(arguments[3]);
    store(self, key, call);
    Py_RETURN_TRUE;
    END_HANDLE_TH_ERRORS
}

// remember_ragged(call, out, lse, launches, gradients, plan_backward, form): the same for packed tokens; the call begins with the longest of q and
// of k. form: whether backward needs out, whether a seed is drawn, and width, most and most_sequences of `Call`.
PyObject* memory_remember_ragged(Memory* self, PyObject* const* arguments, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK(count == 7 && PyTuple_Check(arguments[0]), "remember_ragged takes seven arguments, the call as a tuple first");
    std::vector<const Tensor*> tensors;
    Key key;
    bool records = false;
    Ragged ragged;
    if (!read_ragged(reinterpret_cast<PyTupleObject*>(arguments[0])->ob_item, PyTuple_GET_SIZE(arguments[0]), tensors, key, records, ragged))
        Py_RETURN_FALSE;
    std::shared_ptr<Call> call = described(tensors, arguments);
    auto form = numbers(arguments[6]);
    TORCH_CHECK(form.size() == 5, "a ragged form has five parts: saves_out, draws_seed, width, most, most_sequences");
    call->ragged = true;
    call->saves_out = form[0];
    call->draws_seed = form[1];
    call->width = form[2];
    call->most = form[3];
    call->most_sequences = form[4];
    store(self, key, call);
    Py_RETURN_TRUE;
    END_HANDLE_TH_ERRORS
}

// remember_torch(call, dropout, is_causal, scale, grouped, seen, hidden): torch's own function runs this call, of query, key, value and perhaps a
// mask; seen and hidden are the values that a boolean mask becomes, None where the mask is added unchanged
PyObject* memory_remember_torch(Memory* self, PyObject* const* arguments, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK(count == 7 && PyTuple_Check(arguments[0]), "remember_torch takes seven arguments, the call as a tuple first");
    std::vector<const Tensor*> tensors;
    Key key;
    bool records = false;
    if (!read_call(reinterpret_cast<PyTupleObject*>(arguments[0])->ob_item, PyTuple_GET_SIZE(arguments[0]), tensors, key, records))
        Py_RETURN_FALSE;
    TORCH_CHECK(tensors.size() == 3 || tensors.size() == 4, "torch's function takes query, key, value and perhaps a mask");
    auto call = std::make_shared<Call>();
    call->by_torch = true;
    call->dropout = PyFloat_AsDouble(arguments[1]);
    call->is_causal = PyObject_IsTrue(arguments[2]);
    call->scale = PyFloat_AsDouble(arguments[3]);
    call->grouped = PyObject_IsTrue(arguments[4]);
    if (PyErr_Occurred()) throw python_error();
    if (arguments[5] != Py_None) {
        call->seen = THPVariable_Unpack(arguments[5]);
        call->hidden = THPVariable_Unpack(arguments[6]);
    }
    store(self, key, call);
    Py_RETURN_TRUE;
    END_HANDLE_TH_ERRORS
}

// remember_backward(key, dout, launches, scratch, per_query, shares): for gradients with the layout of this one; False where the call was forgotten
PyObject* memory_remember_backward(Memory* self, PyObject* const* arguments, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK(count == 6, "remember_backward takes a key, an incoming gradient, launches, the bytes of scratch memory in two lists, and shares");
    Key gradient;
    auto found = self->calls->find(numbers(arguments[0]));
    if (found == self->calls->end()) Py_RETURN_FALSE;
    describe(gradient, THPVariable_Unpack(arguments[1]), found->second->ragged);
    Planned planned{launches_of(arguments[2]), numbers(arguments[3]), numbers(arguments[4]), numbers(arguments[5])};
    TORCH_CHECK(planned.shares.empty() || (planned.shares.size() == 3 && !planned.scratch.empty()), "shares are (groups, Tq, Tk) of a piece of scratch memory");
    TORCH_CHECK(planned.per_query.empty() || planned.per_query.size() == planned.scratch.size(), "scratch and per_query are of the same pieces");
    std::lock_guard<std::mutex> lock(found->second->mutex);
    // never replaces existing launches: another thread may be launching them
    if (found->second->backward.size() < 64) found->second->backward.try_emplace(std::move(gradient), std::move(planned));
    Py_RETURN_TRUE;
    END_HANDLE_TH_ERRORS
}

// key(call): the key of a call, None where C++ cannot make it
PyObject* memory_key(Memory*, PyObject* call) {
    HANDLE_TH_ERRORS
    TORCH_CHECK(PyTuple_Check(call), "a call is a tuple of tensors and options");
    std::vector<const Tensor*> tensors;
    Key key;
    bool records = false;
    Ragged ragged;
    PyObject* const* parts = reinterpret_cast<PyTupleObject*>(call)->ob_item;
    const Py_ssize_t count = PyTuple_GET_SIZE(call);
    const bool packed = count && PyLong_CheckExact(parts[0]);
    if (!(packed ? read_ragged(parts, count, tensors, key, records, ragged) : read_call(parts, count, tensors, key, records))) Py_RETURN_NONE;
    THPObjectPtr found(PyTuple_New(static_cast<Py_ssize_t>(key.size())));
    for (size_t i = 0; i < key.size(); ++i) PyTuple_SET_ITEM(found.get(), i, PyLong_FromLongLong(key[i]));
    return found.release();
    END_HANDLE_TH_ERRORS
}

// checked(lengths, keys): their values lie in 0..keys
PyObject* memory_checked(Memory* self, PyObject* const* arguments, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK(count == 2 && THPVariable_Check(arguments[0]), "checked takes lengths and the most that they may be");
    constexpr size_t MOST = 64;
    const Tensor& lengths = THPVariable_Unpack(arguments[0]);
    int64_t keys = PyLong_AsLongLong(arguments[1]);
    std::vector<Checked>& all = *self->checked;
    all.erase(std::remove_if(all.begin(), all.end(), [&](const Checked& one) {
        return one.tensor.expired() || (one.tensor._unsafe_get_target() == lengths.unsafeGetTensorImpl() && one.keys == keys);
    }), all.end());
    if (all.size() >= MOST) all.pop_back();
    // the newest first, which is asked for most
    all.insert(all.begin(), {c10::weak_intrusive_ptr<c10::TensorImpl>(lengths.getIntrusivePtr()), version_of(lengths), keys});
    Py_RETURN_NONE;
    END_HANDLE_TH_ERRORS
}

PyObject* memory_forget(Memory* self, PyObject*) {
    self->calls->clear();
    Py_RETURN_NONE;
}

Py_ssize_t memory_length(Memory* self) { return static_cast<Py_ssize_t>(self->calls->size()); }

PyObject* memory_new(PyTypeObject* type, PyObject*, PyObject*) {
    auto* self = reinterpret_cast<Memory*>(type->tp_alloc(type, 0));
    if (!self) return nullptr;
    self->calls = new std::unordered_map<Key, std::shared_ptr<Call>, Hash>();
    self->checked = new std::vector<Checked>();
    return reinterpret_cast<PyObject*>(self);
}

void memory_free(Memory* self) {
    delete self->calls;
    delete self->checked;
    Py_TYPE(self)->tp_free(reinterpret_cast<PyObject*>(self));
}

// use_driver(launch, current_stream, encode): addresses of functions, for tests whose kernels do not run on a GPU
PyObject* use_driver(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK(count == 3, "use_driver takes three addresses");
    driver.launch = reinterpret_cast<decltype(driver.launch)>(PyLong_AsVoidPtr(arguments[0]));
    driver.current_stream = reinterpret_cast<decltype(driver.current_stream)>(PyLong_AsVoidPtr(arguments[1]));
    driver.encode = reinterpret_cast<decltype(driver.encode)>(PyLong_AsVoidPtr(arguments[2]));
    Py_RETURN_NONE;
    END_HANDLE_TH_ERRORS
}

// has_driver(): whether kernels can be launched
PyObject* has_driver(PyObject*, PyObject*) {
    if (!driver.launch || !driver.current_stream) driver.find();
    return PyBool_FromLong(driver.launch && driver.current_stream);
}

#define FAST(function) reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function))

PyMethodDef memory_methods[] = {
    {"run", FAST(memory_run), METH_FASTCALL, "run(*call): the output of a call that is remembered, None of any other. A call is tensors and options in their order."},
    {"run_ragged", FAST(memory_run_ragged), METH_FASTCALL, "run_ragged(longest_q, longest_k, *call): the same for packed tokens, of any number."},
    {"compute", FAST(memory_compute), METH_FASTCALL, "compute(*call): the results of an op, None of a call that is not remembered."},
    {"remember_op", FAST(memory_remember_op), METH_FASTCALL, "remember_op(call, results, launches, scratch)"},
    {"remember_ragged", FAST(memory_remember_ragged), METH_FASTCALL, "remember_ragged(call, out, lse, launches, gradients, plan_backward, form)"},
    {"remember", FAST(memory_remember), METH_FASTCALL, "remember(call, out, lse, launches, gradients, plan_backward, form)"},
    {"remember_torch", FAST(memory_remember_torch), METH_FASTCALL, "remember_torch(call, dropout, is_causal, scale, grouped, seen, hidden)"},
    {"remember_backward", FAST(memory_remember_backward), METH_FASTCALL, "remember_backward(key, dout, launches, scratch, per_query, shares)"},
    {"key", reinterpret_cast<PyCFunction>(memory_key), METH_O, "key(call): the numbers under which it is remembered."},
    {"checked", FAST(memory_checked), METH_FASTCALL, "checked(lengths, keys): the values of this tensor lie in 0..keys."},
    {"forget", reinterpret_cast<PyCFunction>(memory_forget), METH_NOARGS, "Forget every call."},
    {nullptr, nullptr, 0, nullptr},
};

PySequenceMethods memory_as_sequence = {reinterpret_cast<lenfunc>(memory_length)};

PyTypeObject memory_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

PyMethodDef functions[] = {
    {"use_driver", FAST(use_driver), METH_FASTCALL, "use_driver(launch, current_stream, encode): addresses of what launches, gives streams and encodes tensor maps."},
    {"has_driver", reinterpret_cast<PyCFunction>(has_driver), METH_NOARGS, "Whether kernels can be launched."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "saccade_calls", "Calls that were made before, made again.", -1, functions};

}  // namespace

PyMODINIT_FUNC PyInit_saccade_calls() {
    memory_type.tp_name = "saccade_calls.Memory";
    memory_type.tp_basicsize = sizeof(Memory);
    memory_type.tp_flags = Py_TPFLAGS_DEFAULT;
    memory_type.tp_doc = "Prepared calls by flags and the metadata of their tensors.";
    memory_type.tp_methods = memory_methods;
    memory_type.tp_as_sequence = &memory_as_sequence;
    memory_type.tp_new = memory_new;
    memory_type.tp_dealloc = reinterpret_cast<destructor>(memory_free);
    if (PyType_Ready(&memory_type) < 0) return nullptr;
    PyObject* made = PyModule_Create(&module);
    if (made) {
        Py_INCREF(&memory_type);
        PyModule_AddObject(made, "Memory", reinterpret_cast<PyObject*>(&memory_type));
    }
    return made;
}
