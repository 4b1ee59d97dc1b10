// Replays recorded calls: look-up, allocation, launch and autograd take about 5 us of host time, in Python 30 to 60. Python describes a call once (`Memory.remember`); from then on `Memory.run` replays it.
// It returns None for a new or unusual call, which Python then makes.
#include <Python.h>

#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/ops/empty.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/where.h>
#include <ATen/record_function.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/object_ptr.h>

#include "autograd.hpp"
#include "description.hpp"
#include "lookup.hpp"
#include "packing.hpp"
#include "state.hpp"

namespace {

// --- replays

// out and lse
std::pair<Tensor, Tensor> run_ours(const std::shared_ptr<RecordedCall>& call, const std::vector<const Tensor*>& tensors, bool records, const Ragged& ragged = {}) {
    RECORD_FUNCTION("saccade::KnownAttention", c10::ArrayRef<c10::IValue>{});  // a range while a profiler runs, else one read of a flag
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
    for (const Tensor* tensor : tensors) addresses.push_back(start_of(*tensor));
    addresses.push_back(start_of(out));
    addresses.push_back(start_of(lse));
    if (seed.defined()) addresses.push_back(start_of(seed));
    std::vector<Tensor> scratch;
    call->forward.allocate(scratch, ragged, device);
    for (const Tensor& piece : scratch) addresses.push_back(start_of(piece));
    if (device.is_cuda()) driver.make_current(device.index());
    void* stream = stream_of(device);
    for (const Launch& launch : call->forward.launches) launch.enqueue(addresses, ragged, stream);
    if (!records) return {out, lse};
    auto node = make_node<Backward>();
    node->call = call;
    node->ragged = ragged;
    torch::autograd::edge_list edges;
    for (int i = 0; i < call->differentiable; ++i)
        edges.push_back(tensors[i]->requires_grad() ? torch::autograd::impl::gradient_edge(*tensors[i]) : torch::autograd::Edge());
    node->set_next_edges(std::move(edges));
    for (const Tensor* tensor : tensors) node->inputs.emplace_back(*tensor);
    node->lse = Saved(lse);
    if (seed.defined()) node->seed = Saved(seed);
    if (call->saves_out) {
        // the node must not own the tensor whose history it is; a copy of the header shares the version, so that changes in place are noticed
        c10::TensorImpl* header = out.unsafeGetTensorImpl();
        node->out = Saved(Tensor(header->shallow_copy_and_detach(header->version_counter(), false)));
    }
    torch::autograd::set_history(out, NodePointer(node));
    return {out, lse};
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
    std::shared_ptr<RecordedCall> call = found->second;
    if (call->lengths >= 0 && !self->has_checked(*tensors[call->lengths], call->keys)) Py_RETURN_NONE;
    if (!call->by_torch) {
        std::array<Tensor, 2> converted;
        call->take(tensors, converted);
        const auto [out, lse] = run_ours(call, tensors, records);
        if (!call->returns_lse) return THPVariable_Wrap(out);
        return Py_BuildValue("(NN)", THPVariable_Wrap(out), THPVariable_Wrap(lse));
    }
    std::optional<Tensor> added;
    if (tensors.size() == 4) added = call->hidden.defined() ? at::where(*tensors[3], call->seen, call->hidden) : *tensors[3];
    Tensor out = at::scaled_dot_product_attention(*tensors[0], *tensors[1], *tensors[2], added, call->dropout, call->is_causal, call->scale, call->grouped);
    if (!records) return THPVariable_Wrap(out);
    if (out.grad_fn()->name().find("Cudnn") == std::string::npos)
        out.register_hook([](const Tensor& gradient) { return aligned(gradient); });
    else
        out.register_hook([strides = out.strides().vec()](const Tensor& gradient) { return laid_out(gradient, strides); });
    return THPVariable_Wrap(out);
    END_HANDLE_TH_ERRORS
}

// compute(*call): the results of an op, as a tuple
PyObject* memory_compute(Memory* self, PyObject* const* arguments, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    std::vector<const Tensor*> given;
    Key key;
    bool records = false;
    Ragged ragged;
    given.reserve(9);
    key.reserve(96);
    if (!read_any(arguments, count, given, key, records, ragged)) Py_RETURN_NONE;
    std::shared_ptr<RecordedCall> call = find(*self->calls, key, ragged);
    if (!call) Py_RETURN_NONE;
    const at::Device device = given[0]->device();
    std::vector<Tensor> allocated;
    std::vector<int64_t> addresses;
    for (const Tensor* tensor : given) addresses.push_back(start_of(*tensor));
    for (const Layout& layout : call->results) allocated.push_back(layout.allocate(ragged, device));
    call->op.allocate(allocated, ragged, device);
    for (const Tensor& tensor : allocated) addresses.push_back(start_of(tensor));
    if (device.is_cuda()) driver.make_current(device.index());
    void* stream = stream_of(device);
    for (const Launch& launch : call->op.launches) launch.enqueue(addresses, ragged, stream);
    THPObjectPtr results(PyTuple_New(static_cast<Py_ssize_t>(call->results.size())));
    for (size_t i = 0; i < call->results.size(); ++i) PyTuple_SET_ITEM(results.get(), i, THPVariable_Wrap(allocated[i]));
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
    std::shared_ptr<RecordedCall> call = find(*self->calls, key, ragged);
    if (!call || tensors.size() != static_cast<size_t>(call->inputs)) Py_RETURN_NONE;
    return THPVariable_Wrap(run_ours(call, tensors, records, ragged).first);
    END_HANDLE_TH_ERRORS
}

// --- descriptions of calls from Python

// Destroying a call may run Python, for a closure or tensor that it held. Python may then use this map, or let in another thread that does.
// So nothing is destroyed inside the map: an entry is swapped out, and destroyed once the map is consistent again.
void store(Memory* self, Key& key, std::shared_ptr<RecordedCall> call) {
    if (call->by_lists) key.push_back(BY_LISTS);
    Calls all;
    if (self->calls->size() >= 4096) self->calls->swap(all);  // only an endless stream of new shapes gets here
    (*self->calls)[key].swap(call);
}

// A call as `remember` and `remember_ragged` get it: its tensors; behind the call itself out, lse, the plan of forward, gradients, plan_backward.
std::shared_ptr<RecordedCall> described(const std::vector<const Tensor*>& tensors, PyObject* const* arguments) {
    auto call = std::make_shared<RecordedCall>();
    call->inputs = static_cast<int>(tensors.size());
    call->out = layout_of(arguments[1]);
    call->lse = layout_of(arguments[2]);
    call->forward = planned_of(arguments[3]);
    THPObjectPtr gradients(PySequence_Fast(arguments[4], "gradients is a sequence of tensors"));
    if (!gradients) throw python_error();
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(gradients.get()); ++i)
        call->gradients.push_back(layout_of(PySequence_Fast_GET_ITEM(gradients.get(), i)));
    call->differentiable = static_cast<int>(call->gradients.size());
    Py_INCREF(arguments[5]);
    call->plan_backward = arguments[5];
    return call;
}

// remember(call, out, lse, planned, gradients, plan_backward, form): False if C++ cannot replay this call. form: whether out is transposed,
// whether backward needs it, whether a seed is drawn, the input that holds lengths or -1, the most that they may be, whether they are copied to
// int32, the input that is an expanded boolean mask or -1, and whether the call returns lse too.
PyObject* memory_remember(Memory* self, PyObject* const* arguments, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK(count == 7, "remember takes seven arguments, the call first");
    std::vector<const Tensor*> tensors;
    Key key;
    if (!read_tuple(arguments[0], tensors, key)) Py_RETURN_FALSE;
    std::shared_ptr<RecordedCall> call = described(tensors, arguments);
    auto form = numbers(arguments[6]);
    TORCH_CHECK(form.size() == 8 && form[3] < call->inputs && form[6] < call->inputs && (form[3] >= 0 || !form[5]),
                "a form has eight parts: transposed, saves_out, draws_seed, lengths, keys, wide, expanded, returns_lse");
    call->transposed = form[0];
    call->saves_out = form[1];
    call->draws_seed = form[2];
    call->lengths = static_cast<int>(form[3]);
    call->keys = form[4];
    call->wide = form[5];
    call->expanded = static_cast<int>(form[6]);
    call->returns_lse = form[7];
    store(self, key, call);
    Py_RETURN_TRUE;
    END_HANDLE_TH_ERRORS
}

// remember_op(call, results, planned, limits): for `compute`; the results take the slots after the tensors of the call, then
// comes scratch memory. For packed tokens a result is (a tensor of its dtype, its sizes), and limits are those of `RecordedCall::limit`.
PyObject* memory_remember_op(Memory* self, PyObject* const* arguments, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK(count == 4, "remember_op takes four arguments, the call first");
    std::vector<const Tensor*> tensors;
    Key key;
    if (!read_tuple(arguments[0], tensors, key)) Py_RETURN_FALSE;
    auto call = std::make_shared<RecordedCall>();
    THPObjectPtr results(PySequence_Fast(arguments[1], "results is a sequence of tensors"));
    if (!results) throw python_error();
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(results.get()); ++i)
        call->results.push_back(result_of(PySequence_Fast_GET_ITEM(results.get(), i)));
    call->op = planned_of(arguments[2]);
    call->limit(numbers(arguments[3]));
    store(self, key, call);
    Py_RETURN_TRUE;
    END_HANDLE_TH_ERRORS
}

// remember_ragged(call, out, lse, planned, gradients, plan_backward, form): the same for packed tokens; the call begins with the longest of q and
// of k. form: whether backward needs out, whether a seed is drawn, and the numbers of `RecordedCall::limit`.
PyObject* memory_remember_ragged(Memory* self, PyObject* const* arguments, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK(count == 7, "remember_ragged takes seven arguments, the call first");
    std::vector<const Tensor*> tensors;
    Key key;
    if (!read_tuple(arguments[0], tensors, key)) Py_RETURN_FALSE;
    std::shared_ptr<RecordedCall> call = described(tensors, arguments);
    auto form = numbers(arguments[6]);
    TORCH_CHECK(form.size() == 7, "a ragged form has seven parts: saves_out, draws_seed and five limits");
    call->saves_out = form[0];
    call->draws_seed = form[1];
    call->limit({form.begin() + 2, form.end()});
    store(self, key, call);
    Py_RETURN_TRUE;
    END_HANDLE_TH_ERRORS
}

// remember_torch(call, dropout, is_causal, scale, grouped, seen, hidden): torch's own function runs this call, of query, key, value and perhaps a
// mask; seen and hidden are the values that a boolean mask becomes, None where the mask is added unchanged
PyObject* memory_remember_torch(Memory* self, PyObject* const* arguments, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK(count == 7, "remember_torch takes seven arguments, the call first");
    std::vector<const Tensor*> tensors;
    Key key;
    if (!read_tuple(arguments[0], tensors, key)) Py_RETURN_FALSE;
    TORCH_CHECK(tensors.size() == 3 || tensors.size() == 4, "torch's function takes query, key, value and perhaps a mask");
    auto call = std::make_shared<RecordedCall>();
    call->by_torch = true;
    call->dropout = PyFloat_AsDouble(arguments[1]);
    call->is_causal = PyObject_IsTrue(arguments[2]);
    call->scale = PyFloat_AsDouble(arguments[3]);
    call->grouped = PyObject_IsTrue(arguments[4]);
    if (PyErr_Occurred()) throw python_error();
    if (arguments[5] != Py_None) {
        call->seen = tensor_of(arguments[5]);
        call->hidden = tensor_of(arguments[6]);
    }
    store(self, key, call);
    Py_RETURN_TRUE;
    END_HANDLE_TH_ERRORS
}

// remember_backward(key, tensors, planned): for gradients with the layout of this one; False where the call was forgotten. tensors: those that
// `plan_backward` was called with.
PyObject* memory_remember_backward(Memory* self, PyObject* const* arguments, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK(count == 3, "remember_backward takes a key, tensors and a plan");
    Key gradient;
    auto found = self->calls->find(numbers(arguments[0]));
    if (found == self->calls->end()) Py_RETURN_FALSE;
    const std::shared_ptr<RecordedCall> call = found->second;
    THPObjectPtr tensors(PySequence_Fast(arguments[1], "tensors is a sequence of tensors"));
    if (!tensors) throw python_error();
    const Py_ssize_t size = PySequence_Fast_GET_SIZE(tensors.get()), dout = call->inputs + 1;  // behind lse
    TORCH_CHECK(size > dout, "there is no incoming gradient among ", size, " tensors");
    std::vector<int64_t> starts;
    for (Py_ssize_t i = 0; i < size; ++i) starts.push_back(start_of(tensor_of(PySequence_Fast_GET_ITEM(tensors.get(), i))));
    describe(gradient, tensor_of(PySequence_Fast_GET_ITEM(tensors.get(), dout)), call->ragged);
    describe_starts(gradient, starts);
    Planned planned = planned_of(arguments[2]);
    std::lock_guard<std::mutex> lock(call->mutex);
    // never replaces existing launches: another thread may be launching them
    if (call->backward.size() < 64) call->backward.try_emplace(std::move(gradient), std::move(planned));
    Py_RETURN_TRUE;
    END_HANDLE_TH_ERRORS
}

// key(call): the key of a call, None if C++ cannot replay it
PyObject* memory_key(Memory*, PyObject* call) {
    HANDLE_TH_ERRORS
    std::vector<const Tensor*> tensors;
    Key key;
    if (!read_tuple(call, tensors, key)) Py_RETURN_NONE;
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
    // the newest first, which is looked up most
    std::vector<Checked> all = {{c10::weak_intrusive_ptr<c10::TensorImpl>(lengths.getIntrusivePtr()), version_of(lengths), keys}};
    for (const Checked& one : *self->checked) {
        const bool same = one.tensor._unsafe_get_target() == lengths.unsafeGetTensorImpl() && one.keys == keys;
        if (!same && !one.tensor.expired() && all.size() < MOST) all.push_back(one);
    }
    self->checked->swap(all);  // and dropped entries are destroyed here, as in `store`
    Py_RETURN_NONE;
    END_HANDLE_TH_ERRORS
}

PyObject* memory_forget(Memory* self, PyObject*) {
    Calls all;
    self->calls->swap(all);
    Py_RETURN_NONE;
}

Py_ssize_t memory_length(Memory* self) { return static_cast<Py_ssize_t>(self->calls->size()); }

PyObject* memory_new(PyTypeObject* type, PyObject*, PyObject*) {
    auto* self = reinterpret_cast<Memory*>(type->tp_alloc(type, 0));
    if (!self) return nullptr;
    self->calls = new Calls();
    self->checked = new std::vector<Checked>();
    return reinterpret_cast<PyObject*>(self);
}

void memory_free(Memory* self) {
    delete self->calls;
    delete self->checked;
    Py_TYPE(self)->tp_free(reinterpret_cast<PyObject*>(self));
}

// use_driver(launch, current_stream, encode, captures): addresses of functions, for tests whose kernels do not run on a GPU
PyObject* use_driver(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK(count == 3 || count == 4, "use_driver takes three addresses, or four");
    driver.launch = reinterpret_cast<decltype(driver.launch)>(PyLong_AsVoidPtr(arguments[0]));
    driver.current_stream = reinterpret_cast<decltype(driver.current_stream)>(PyLong_AsVoidPtr(arguments[1]));
    driver.encode = reinterpret_cast<decltype(driver.encode)>(PyLong_AsVoidPtr(arguments[2]));
    driver.captures = reinterpret_cast<decltype(driver.captures)>(count == 4 ? PyLong_AsVoidPtr(arguments[3]) : nullptr);
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
    {"remember_op", FAST(memory_remember_op), METH_FASTCALL, "remember_op(call, results, planned, limits)"},
    {"remember_ragged", FAST(memory_remember_ragged), METH_FASTCALL, "remember_ragged(call, out, lse, planned, gradients, plan_backward, form)"},
    {"remember", FAST(memory_remember), METH_FASTCALL, "remember(call, out, lse, planned, gradients, plan_backward, form)"},
    {"remember_torch", FAST(memory_remember_torch), METH_FASTCALL, "remember_torch(call, dropout, is_causal, scale, grouped, seen, hidden)"},
    {"remember_backward", FAST(memory_remember_backward), METH_FASTCALL, "remember_backward(key, tensors, planned)"},
    {"key", reinterpret_cast<PyCFunction>(memory_key), METH_O, "key(call): the numbers under which it is remembered."},
    {"checked", FAST(memory_checked), METH_FASTCALL, "checked(lengths, keys): the values of this tensor lie in 0..keys."},
    {"forget", reinterpret_cast<PyCFunction>(memory_forget), METH_NOARGS, "Forget every call."},
    {nullptr, nullptr, 0, nullptr},
};

PySequenceMethods memory_as_sequence = {reinterpret_cast<lenfunc>(memory_length)};

PyTypeObject memory_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

PyMethodDef functions[] = {
    {"use_driver", FAST(use_driver), METH_FASTCALL, "use_driver(launch, current_stream, encode, captures): addresses of what launches, gives streams, encodes tensor maps and knows captures."},
    {"pack", FAST(pack), METH_FASTCALL, "pack(ids, mask, types, positions, padding, counted, reads_first): the real tokens of a padded batch."},
    {"fill", FAST(fill), METH_FASTCALL, "fill(memory, capacity, numbers, ends): a packed batch in the memory of the host from which a graph's is copied."},
    {"unpack", FAST(unpack), METH_FASTCALL, "unpack(rows, places, tokens, B, T): packed rows in a padded batch, with zeros where there is padding."},
    {"state_of", FAST(state_of), METH_FASTCALL, "state_of(dicts, hooks, owns, marks, every): what a captured graph of a model depends on, as bytes."},
    {"is_state", FAST(is_state), METH_FASTCALL, "is_state(state, gradients, dicts, hooks, owns, marks, every): whether it still is what these bytes say."},
    {"places_of", reinterpret_cast<PyCFunction>(places_of), METH_O, "places_of(tensors): where their memory lies, which this does not keep alive."},
    {"hold", reinterpret_cast<PyCFunction>(hold), METH_O, "hold(places): whether all of that memory is allocated, and none has moved."},
    {"has_driver", reinterpret_cast<PyCFunction>(has_driver), METH_NOARGS, "Whether kernels can be launched."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "saccade_calls", "Replays calls that were recorded.", -1, functions};

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
