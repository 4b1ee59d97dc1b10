// A call without its data, and the parts of a call that are remembered.
#pragma once

#include <Python.h>
#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include "launch.hpp"

namespace {

using at::Tensor;

struct Layout {
    std::vector<int64_t> sizes;  // of a result of a ragged op -2 - i for number i of the call
    std::vector<int64_t> strides;  // empty for a ragged op's, which are contiguous
    at::ScalarType dtype;
    bool zeros = false;  // launches leave numbers of it as they are

    Tensor allocate(const at::Device& device) const {
        Tensor made = at::empty_strided(sizes, strides, at::TensorOptions().dtype(dtype).device(device));
        return zeros ? made.zero_() : made;
    }
    // with another number of tokens, the first size
    Tensor allocate(int64_t tokens, const at::Device& device) const {
        std::vector<int64_t> mine = sizes;
        mine[0] = tokens;
        return at::empty_strided(mine, strides, at::TensorOptions().dtype(dtype).device(device));
    }
    Tensor allocate(const Ragged& ragged, const at::Device& device) const {
        if (!strides.empty()) return allocate(device);
        std::vector<int64_t> mine = sizes;
        for (int64_t& size : mine) size = ragged.extent(size);
        return at::empty(mine, at::TensorOptions().dtype(dtype).device(device));
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

// ragged: without the number of its tokens or sequences, the first size; of two dimensions, [H, T], without any, as they are contiguous
void describe(Key& key, const Tensor& tensor, bool ragged = false) {
    key.push_back(tensor.dim() | static_cast<int64_t>(tensor.scalar_type()) << 8 | (tensor.device().index() + 1) << 16 |
                  static_cast<int64_t>(tensor.device().type()) << 24 | static_cast<int64_t>(starts_at_16_bytes(tensor)) << 32 |
                  static_cast<int64_t>(at::GradMode::is_enabled() && tensor.requires_grad()) << 33);
    if (ragged && tensor.dim() == 2) return;
    for (int64_t size : tensor.sizes().slice(ragged && tensor.dim() ? 1 : 0)) key.push_back(size);
    for (int64_t stride : tensor.strides()) key.push_back(stride);
}

int64_t start_of(const Tensor& tensor) { return reinterpret_cast<int64_t>(tensor.const_data_ptr()); }

// Launches are recorded by address, and tensors may begin at the same one. So the key holds, for each tensor, the first that begins there.
void describe_starts(Key& key, const std::vector<int64_t>& starts) {
    for (int64_t start : starts) key.push_back(std::find(starts.begin(), starts.end(), start) - starts.begin());
}

// The launches of a call in one direction, and the bytes of each piece of memory that they share.
struct Planned {
    std::vector<Launch> launches;
    std::vector<int64_t> scratch, per_query;
    std::vector<int64_t> shares;  // (piece, groups, Tq, Tk): the last gradient is the sum of what the launches leave in that piece; else empty

    int64_t bytes(size_t piece, const Ragged& ragged) const {
        return scratch[piece] + (per_query.empty() ? 0 : per_query[piece] * ragged.numbers[Ragged::QUERIES]);
    }
    void allocate(std::vector<Tensor>& into, const Ragged& ragged, const at::Device& device) const {
        for (size_t i = 0; i < scratch.size(); ++i)
            into.push_back(at::empty({bytes(i, ragged)}, at::TensorOptions().dtype(at::kByte).device(device)));
    }
};

// A call that Python recorded. With `by_torch` torch's own function runs; otherwise our launches do, and the first `differentiable` inputs get gradients.
struct RecordedCall {
    bool by_torch = false, is_causal = false, grouped = false;
    double scale = 1.0, dropout = 0.0;  // of torch's function
    Tensor seen, hidden;  // the values that a boolean mask becomes for torch: 0 and -inf
    int inputs = 0, differentiable = 0;
    Layout out, lse;
    Planned forward;
    std::vector<Layout> gradients;
    bool transposed = false;  // out, and so its gradient, is [B, T, H, D]
    bool saves_out = false;   // backward needs it
    bool draws_seed = false;  // a Philox key of dropout, int64 [1] from torch's generator, behind out and lse
    int lengths = -1;         // which input holds the number of keys of each batch row
    int64_t keys = 0;         // the most that they may be
    bool wide = false;        // they are copied to contiguous int32
    int expanded = -1;        // which input is a boolean mask that was expanded over the queries, of which one row is taken
    bool returns_lse = false;  // beside out; only of calls without a gradient
    bool ragged = false;      // packed tokens [T, H, D]: layouts hold for any number of tokens and sequences
    int64_t width = 0, most = 0, most_sequences = 0;  // of a ragged call: its numbers, padded to the longest, are at most `most`
    bool by_tokens = false;   // .. or those of its tokens alone
    bool by_lists = false;    // .. or more: these are the launches for lists of lengths
    std::vector<Layout> results;  // of a call of an op, which is below autograd: all that it returns
    Planned op;                   // and its launches

    // numbers: width, most, most_sequences, by_tokens and by_lists of a ragged call
    void limit(const std::vector<int64_t>& numbers) {
        if (numbers.empty()) return;
        TORCH_CHECK(numbers.size() == 5, "a ragged call has five limits");
        ragged = true;
        width = numbers[0];
        most = numbers[1];
        most_sequences = numbers[2];
        by_tokens = numbers[3];
        by_lists = numbers[4];
    }
    bool fits(const Ragged& given) const {
        const int64_t sequences = given.numbers[Ragged::SEQUENCES];
        const int64_t rows = by_tokens ? given.numbers[Ragged::QUERIES] : sequences * given.longest();
        return !ragged || (sequences <= most_sequences && (rows * width > most) == by_lists);
    }

    // replaces given tensors by those that are launched; `converted` holds them
    void take(std::vector<const Tensor*>& tensors, std::array<Tensor, 2>& converted) const {
        if (wide) tensors[lengths] = &(converted[0] = tensors[lengths]->to(at::kInt).contiguous());
        if (expanded >= 0) tensors[expanded] = &(converted[1] = tensors[expanded]->narrow(-2, 0, 1));
    }

    std::mutex mutex;
    std::unordered_map<Key, Planned, Hash> backward;  // by the layout of the incoming gradient, and which tensors begin in one place
    PyObject* plan_backward = nullptr;                // `(*inputs, lse, dout, perhaps out, perhaps seed) -> gradients`, which may add to `backward`

    ~RecordedCall() {
        if (plan_backward && Py_IsInitialized()) {
            PyGILState_STATE state = PyGILState_Ensure();
            Py_DECREF(plan_backward);
            PyGILState_Release(state);
        }
    }
};

}  // namespace
