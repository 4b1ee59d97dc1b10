// How a call from Python becomes a key, under which it is remembered.
#pragma once

#include <Python.h>
#include <algorithm>
#include <cstring>
#include <memory>
#include <unordered_map>
#include <vector>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/python_variable.h>
#include "call.hpp"

namespace {

// Lengths whose values Python has found to lie in 0..keys. Reading them waits for the device, so they are identified by the tensor and its version.
struct Checked {
    c10::weak_intrusive_ptr<c10::TensorImpl> tensor;  // keeps the address from being given to another tensor
    int64_t version, keys;
};

int64_t version_of(const Tensor& tensor) {
    return tensor.is_inference() ? -1 : static_cast<int64_t>(tensor.unsafeGetTensorImpl()->version_counter().current_version());
}

using Calls = std::unordered_map<Key, std::shared_ptr<RecordedCall>, Hash>;

constexpr int64_t BY_LISTS = 1;  // at the end of a key, as in `saccade.native.described`

// The call that replays this one. A packed batch is one launch or goes by lists of lengths, which are kinds of their own.
std::shared_ptr<RecordedCall> find(const Calls& calls, Key& key, const Ragged& ragged) {
    for (int i = 0; i < 2; ++i, key.push_back(BY_LISTS)) {
        auto found = calls.find(key);
        if (found != calls.end() && found->second->fits(ragged)) return found->second;
    }
    return nullptr;
}

struct Memory {
    PyObject_HEAD
    Calls* calls;
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
        // a nested tensor of the strided layout has no sizes
        if (tensor.layout() != at::kStrided || tensor.is_nested() || tensor.is_neg() || tensor.is_conj() || tensor._is_zerotensor()) return false;
        if (tensor.is_meta() || (tensor.is_inference() && at::GradMode::is_enabled())) return false;
        describe(key, tensor, ragged);
        needed |= tensor.requires_grad();
        tensors.push_back(&tensor);
    }
    std::vector<int64_t> starts;
    for (const Tensor* tensor : tensors) starts.push_back(start_of(*tensor));
    describe_starts(key, starts);
    records = needed && at::GradMode::is_enabled();
    key.push_back(records);
    const at::Device device = tensors[0]->device();
    if (captured(device)) return false;
    if (at::autocast::is_autocast_enabled(device.type())) {
        // Python would cast tensors of another dtype, but a remembered call is launched with the tensors as they were given
        at::ScalarType wanted = at::autocast::get_autocast_dtype(device.type());
        for (const Tensor* tensor : tensors)
            if (tensor->is_floating_point() && tensor->scalar_type() != wanted) return false;
    }
    return !device.is_cuda() || c10::impl::getDeviceGuardImpl(device.type())->getDevice() == device;
}

constexpr int64_t FILLED = 512;  // up to less, kernels are chosen by powers of two; `ragged.config.forward_by_triton` changes at 512 itself

// A call of packed tokens: (longest of q, of k, query, key, value, cu_seqlens_q, cu_seqlens_k, others and options), or one tensor [T, 3, H, D] and
// one cu_seqlens in their place. Its key has no numbers of tokens or sequences, and of the longest ones the power of two that holds them, from FILLED on
// also whether they fill it.
bool read_ragged(PyObject* const* arguments, Py_ssize_t count, std::vector<const Tensor*>& tensors, Key& key, bool& records, Ragged& ragged) {
    if (count < 7 || !PyLong_CheckExact(arguments[0]) || !PyLong_CheckExact(arguments[1])) return false;
    key.push_back(-1);  // unlike any other call
    if (!read_call(arguments + 2, count - 2, tensors, key, records, true)) return false;
    const bool one = tensors[0]->dim() == 4;
    const size_t rows = one ? 1 : 3, inputs = one ? 2 : 5;
    if (tensors.size() < inputs) return false;
    for (size_t i = 0; i < inputs; ++i)
        if (tensors[i]->dim() != (i >= rows ? 1 : one ? 4 : 3)) return false;
    const Tensor &query = *tensors[0], &key_ = *tensors[one ? 0 : 1], &value = *tensors[one ? 0 : 2];
    for (size_t i = inputs; i < tensors.size(); ++i)  // dout, out, lse and a seed
        if (tensors[i]->dim() == 2 ? !tensors[i]->is_contiguous() || tensors[i]->size(1) != query.size(0)
                                   : tensors[i]->dim() == 3 && tensors[i]->size(0) != query.size(0))
            return false;
    const Tensor &offsets_q = *tensors[rows], &offsets_k = *tensors[inputs - 1];
    const int64_t sequences = offsets_q.size(0) - 1;
    if (key_.size(0) != value.size(0) || offsets_k.size(0) != sequences + 1) return false;
    const int64_t found[] = {query.size(0), key_.size(0), sequences, PyLong_AsLongLong(arguments[0]), PyLong_AsLongLong(arguments[1])};
    PyErr_Clear();  // of a number beyond 64 bits, which is -1 here
    for (int i = 0; i < 5; ++i) {
        if (found[i] < 1 || found[i] >= int64_t(1) << 31) return false;
        ragged.numbers[i] = found[i];
    }
    ragged.numbers[Ragged::ROWS_OF_16_BYTES] = 16 * sequences;
    for (int64_t left = sequences; left; left /= 2) ++ragged.numbers[Ragged::HALVINGS];
    for (int i : {Ragged::LONGEST_Q, Ragged::LONGEST_K}) {
        int64_t tile = 16;
        while (tile < ragged.numbers[i]) tile *= 2;
        key.push_back(tile + (tile >= FILLED && tile == ragged.numbers[i]));
    }
    key.push_back(offsets_q.is_same(offsets_k) && query.size(0) == key_.size(0));  // token tiles take one list of one number of tokens
    return true;
}

// Either, by what comes first.
bool read_any(PyObject* const* arguments, Py_ssize_t count, std::vector<const Tensor*>& tensors, Key& key, bool& records, Ragged& ragged) {
    const bool packed = count && PyLong_CheckExact(arguments[0]);
    return packed ? read_ragged(arguments, count, tensors, key, records, ragged) : read_call(arguments, count, tensors, key, records);
}

// The tensors and the key of a call that Python describes, of which it hands over all arguments as a tuple.
bool read_tuple(PyObject* call, std::vector<const Tensor*>& tensors, Key& key) {
    TORCH_CHECK(PyTuple_Check(call), "a call is a tuple of tensors and options");
    bool records = false;
    Ragged ragged;
    return read_any(reinterpret_cast<PyTupleObject*>(call)->ob_item, PyTuple_GET_SIZE(call), tensors, key, records, ragged);
}

}  // namespace
