// The autograd node of a call, whose backward hands nothing to Python once it is known.
#pragma once

#include <memory>
#include <mutex>
#include <type_traits>
#include <vector>
#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/utils/object_ptr.h>
#include "call.hpp"

namespace {

using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

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

// A tensor that forward saved, and what it was then. Backward may find it at another address or with other strides, since saved-tensor hooks may
// return copies; kernels read by the layout that forward saw.
struct Saved {
    SavedVariable variable;
    at::DimVector sizes, strides;
    at::ScalarType dtype = at::kFloat;
    at::Device device = at::kCPU;

    Saved() = default;
    explicit Saved(const Tensor& tensor)
        : variable(tensor, false), sizes(tensor.sizes()), strides(tensor.strides()), dtype(tensor.scalar_type()), device(tensor.device()) {}

    Tensor as_it_lay() const {
        Tensor tensor = variable.unpack();
        TORCH_CHECK(tensor.scalar_type() == dtype && tensor.sizes().equals(sizes) && tensor.device() == device, "backward found ",
                    tensor.scalar_type(), " of shape ", tensor.sizes(), " on ", tensor.device(), " where forward had saved ", dtype, " of shape ",
                    at::IntArrayRef(sizes), " on ", device,
                    "; a saved-tensor hook must return what it was given, and .data must keep its shape");
        if (tensor.strides().equals(strides) && starts_at_16_bytes(tensor)) return tensor;
        // a tensor that was broadcast in forward is copied once and broadcast again
        for (int64_t i = 0; i < tensor.dim(); ++i)
            if (strides[i] == 0 && sizes[i] > 1) tensor = tensor.narrow(i, 0, 1);
        return at::empty_strided(tensor.sizes(), strides, tensor.options()).copy_(tensor).expand(sizes);
    }
};

// The gradient of a bias, of which each program leaves a share, float32 [.., groups, Tq, Tk]: summed over the programs, and over queries or keys
// where the bias has one. A single share is the sum.
Tensor total(const std::vector<Tensor>& pieces, const std::vector<int64_t>& shares, const Layout& wanted) {
    Tensor sum = pieces[shares[0]].view(at::kFloat).view({-1, shares[1], shares[2], shares[3]});
    sum = sum.size(0) == 1 ? sum[0] : sum.sum(0);
    const int64_t queries = wanted.sizes.size() < 2 ? 1 : wanted.sizes[wanted.sizes.size() - 2], keys = wanted.sizes.empty() ? 1 : wanted.sizes.back();
    if (queries == 1 && shares[2] > 1) sum = sum.sum(1, true);
    if (keys == 1 && shares[3] > 1) sum = sum.sum(2, true);
    return sum.to(wanted.dtype).view(wanted.sizes);
}

struct Backward : Node {
    std::shared_ptr<RecordedCall> call;
    Ragged ragged;
    std::vector<Saved> inputs;
    Saved lse, out, seed;

    std::string name() const override { return "saccade::KnownAttentionBackward"; }

    void release_variables() override {
        std::lock_guard<std::mutex> lock(mutex_);
        for (Saved& input : inputs) input.variable.reset_data();
        for (Saved* saved : {&lse, &out, &seed}) saved->variable.reset_data();
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
        for (const Saved& input : inputs) add(input.variable.unpack());
        if (sources.empty()) return found;
        auto refuse = make_node<torch::autograd::Error>(NO_SECOND, std::move(sources));
        for (Tensor& gradient : found) torch::autograd::set_history(gradient, NodePointer(refuse));
        return found;
    }

    variable_list gradients(Tensor dout) {
        std::vector<Tensor> tensors;
        for (const Saved& input : inputs) tensors.push_back(input.as_it_lay());
        tensors.push_back(lse.as_it_lay());
        // the gradient of an imaginary part may have the other sign in memory, and that of `torch.sgn` has none
        dout = dout._is_zerotensor() ? at::zeros(dout.sizes(), dout.options()) : dout.resolve_neg();
        if (call->transposed) dout = dout.transpose(1, 2);
        if (dout.stride(-1) != 1 && dout.size(-1) != 1) dout = dout.contiguous();
        tensors.push_back(dout);
        if (call->saves_out) {
            Tensor saved = out.as_it_lay();
            tensors.push_back(call->transposed ? saved.transpose(1, 2) : saved);
        }
        if (call->draws_seed) tensors.push_back(seed.as_it_lay());
        std::vector<int64_t> addresses;
        for (const Tensor& tensor : tensors) addresses.push_back(start_of(tensor));
        Key key;
        describe(key, dout, call->ragged);
        describe_starts(key, addresses);  // saved-tensor hooks may return separate copies of tensors that shared memory
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
        for (size_t i = addresses.size(); i < tensors.size(); ++i) addresses.push_back(start_of(tensors[i]));
        std::vector<Tensor> pieces;
        planned->allocate(pieces, ragged, device);
        for (const Tensor& piece : pieces) addresses.push_back(start_of(piece));
        void* stream = stream_of(device);
        for (const Launch& launch : planned->launches) launch.enqueue(addresses, ragged, stream);
        if (!planned->shares.empty()) found.back() = total(pieces, planned->shares, call->gradients.back());
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

// cuDNN's kernels misread a gradient with strides other than the output's (`_like` in saccade/exact/sdpa.py says why)
Tensor laid_out(const Tensor& gradient, at::IntArrayRef strides) {
    if (gradient.strides() == strides && aligned(gradient).is_same(gradient)) return gradient;
    return at::empty_strided(gradient.sizes(), strides, gradient.options()).copy_(gradient);
}

}  // namespace
