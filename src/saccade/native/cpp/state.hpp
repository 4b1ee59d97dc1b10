// The state on which a captured graph of a model depends: recorded as bytes, and compared with them at each call. In Python the same walk over MiniLM
// takes 90 to 300 us.
#pragma once

#include <Python.h>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

namespace {

// The address of a tensor's numbers; 0 if it has no memory of its own, like a wrapper of other tensors.
int64_t address_of(const c10::TensorImpl& impl) {
    if (!impl.has_storage() || !impl.storage()) return 0;
    return reinterpret_cast<int64_t>(impl.storage().data()) + impl.storage_offset() * static_cast<int64_t>(impl.itemsize());
}

// Dtype, sizes and strides in one number. Wrappers of other tensors, and those of symbolic sizes, have 0.
int64_t form_of(const c10::TensorImpl& impl) {
    if (!impl.has_storage() || impl.has_symbolic_sizes_strides()) return 0;
    uint64_t mixed = static_cast<uint64_t>(impl.dtype().toScalarType()) + 1;
    const auto sizes = impl.sizes(), strides = impl.strides();
    for (size_t i = 0; i < sizes.size(); ++i) {
        mixed = (mixed ^ static_cast<uint64_t>(sizes[i])) * 0x9E3779B97F4A7C15u;
        mixed = (mixed ^ static_cast<uint64_t>(strides[i])) * 0xC2B2AE3D27D4EB4Fu;
    }
    return static_cast<int64_t>(mixed);
}

// The record of a tensor. Object and impl are compared too, as `swap_tensors` exchanges the impls of two objects.
struct Kept {
    const PyObject* object;
    const c10::TensorImpl* impl;
    int64_t address, form, requires_grad;

    static Kept of(PyObject* object, bool gradients) {
        const c10::TensorImpl* impl = THPVariable_Unpack(object).unsafeGetTensorImpl();
        return {object, impl, address_of(*impl), form_of(*impl), gradients && impl->requires_grad()};
    }
    bool is(PyObject* now, bool gradients) const {
        if (THPVariable_Unpack(now).unsafeGetTensorImpl() != impl) return false;
        return address_of(*impl) == address && form_of(*impl) == form && (!gradients || impl->requires_grad() == bool(requires_grad));
    }
    // A walk reads thousands of scattered cache lines, and waiting for them one by one dominates its time
    void fetch() const {
        __builtin_prefetch(object);
        for (size_t line = 0; line < sizeof(c10::TensorImpl); line += 64) __builtin_prefetch(reinterpret_cast<const char*>(impl) + line);
    }
};

constexpr Py_ssize_t AHEAD = 12;  // entries of a list that are fetched before they are read

PyObject* ahead(PyObject* list, Py_ssize_t i) {
    if (i + AHEAD < PyList_GET_SIZE(list)) __builtin_prefetch(PyList_GET_ITEM(list, i + AHEAD));
    return PyList_GET_ITEM(list, i);
}

// Records the words and tensors of a walk.
struct Recorder {
    std::vector<int64_t> words;
    std::vector<Kept> tensors;

    bool take(int64_t word) {
        words.push_back(word);
        return true;
    }
    bool take_object(PyObject* value) {
        // THPVariable_Check asks the metaclass, which takes ten times as long
        if (PyType_IsSubtype(Py_TYPE(value), reinterpret_cast<PyTypeObject*>(THPVariableClass))) tensors.push_back(Kept::of(value, true));
        return take(reinterpret_cast<int64_t>(value));
    }
};

// Compares the words of a walk with those of an earlier one.
struct Comparison {
    const int64_t *next, *end;

    bool take(int64_t word) { return next != end && *next++ == word; }
    bool take_object(PyObject* value) { return take(reinterpret_cast<int64_t>(value)); }
};

// Walks over dicts, hooks, owns and marks, as `state_of` is given them.
template <class Words>
bool walk(PyObject* const* lists, Words& words) {
    static PyObject* const training = PyUnicode_InternFromString("training");
    for (int i = 0; i < 4; ++i) TORCH_CHECK(PyList_Check(lists[i]), "the state is read of four lists");
    const auto dict = [&](int list, Py_ssize_t i) {
        PyObject* found = ahead(lists[list], i);
        TORCH_CHECK(PyDict_Check(found), "the state is read of lists of dicts");
        return found;
    };
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(lists[0]); ++i) {
        PyObject *values = dict(0, i), *key = nullptr, *value = nullptr;
        const Py_ssize_t size = PyDict_GET_SIZE(values);
        if (!words.take(size)) return false;
        for (Py_ssize_t place = 0; size && PyDict_Next(values, &place, &key, &value);)
            if (!words.take_object(value)) return false;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(lists[1]); ++i)
        if (!words.take(PyDict_GET_SIZE(dict(1, i)))) return false;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(lists[2]); ++i)
        if (!words.take(reinterpret_cast<int64_t>(PyDict_GetItemWithError(dict(2, i), training)))) return false;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(lists[3]); ++i) {
        PyObject* mark = ahead(lists[3], i);
        TORCH_CHECK(PyTuple_Check(mark) && PyTuple_GET_SIZE(mark) == 2 && PyDict_Check(PyTuple_GET_ITEM(mark, 0)), "a mark is a dict and a key");
        if (!words.take(reinterpret_cast<int64_t>(PyDict_GetItemWithError(PyTuple_GET_ITEM(mark, 0), PyTuple_GET_ITEM(mark, 1))))) return false;
    }
    return true;
}

// The version that Python gives a dict at each change. Python 3.12 and later have none, and every dict is walked.
#if PY_VERSION_HEX < 0x030C0000
int64_t version_of_dict(PyObject* dict) { return static_cast<int64_t>(reinterpret_cast<PyDictObject*>(dict)->ma_version_tag); }
constexpr bool COUNTS_CHANGES = true;
#else
int64_t version_of_dict(PyObject*) { return 0; }
constexpr bool COUNTS_CHANGES = false;
#endif

// Walks over dicts whose changes Python counts, and over hooks, of which only the size matters. A third of the memory that `walk` reads.
template <class Words>
bool walk_numbers(PyObject* every, PyObject* hooks, Words& words) {
    if (!COUNTS_CHANGES) return false;
    TORCH_CHECK(PyList_Check(every) && PyList_Check(hooks), "the state is read of lists");
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(every); ++i) {
        PyObject* dict = ahead(every, i);
        TORCH_CHECK(PyDict_Check(dict), "the state is read of lists of dicts");
        if (!words.take(version_of_dict(dict))) return false;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(hooks); ++i) {
        PyObject* dict = ahead(hooks, i);
        TORCH_CHECK(PyDict_Check(dict), "the state is read of lists of dicts");
        if (!words.take(PyDict_GET_SIZE(dict))) return false;
    }
    return true;
}

// The head of the bytes of a state: the records of tensors follow, then the words of `walk`, then those of `walk_numbers`.
struct Head {
    int64_t tensors, words, numbers;
};

// state_of(dicts, hooks, owns, marks, every): every value of `dicts`, and of tensors their memory, form and whether they want a gradient; the size of
// each dict in `hooks`; `training` of each dict in `owns`, the attributes of a module; and the value of each mark, a dict and a key. every: the dicts of
// all lists but hooks.
PyObject* state_of(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK(count == 5, "state_of takes five lists");
    Recorder found, numbers;
    walk(arguments, found);
    walk_numbers(arguments[4], arguments[1], numbers);
    const Head head{static_cast<int64_t>(found.tensors.size()), static_cast<int64_t>(found.words.size()), static_cast<int64_t>(numbers.words.size())};
    const Py_ssize_t tensors = head.tensors * sizeof(Kept), words = head.words * sizeof(int64_t), rest = head.numbers * sizeof(int64_t);
    PyObject* bytes = PyBytes_FromStringAndSize(nullptr, sizeof(Head) + tensors + words + rest);
    if (!bytes) return nullptr;
    char* into = PyBytes_AS_STRING(bytes);
    std::memcpy(into, &head, sizeof(Head));
    std::memcpy(into + sizeof(Head), found.tensors.data(), tensors);
    std::memcpy(into + sizeof(Head) + tensors, found.words.data(), words);
    std::memcpy(into + sizeof(Head) + tensors + words, numbers.words.data(), rest);
    return bytes;
    END_HANDLE_TH_ERRORS
}

// is_state(state, gradients, dicts, hooks, owns, marks, every): whether `state_of` would give the same bytes. The caller holds all values that it gave them
// for, so that no other object has their addresses. gradients: whether it matters which tensors want one.
PyObject* is_state(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK(count == 7 && PyBytes_Check(arguments[0]), "is_state takes bytes of state_of, a flag and five lists");
    const auto* head = reinterpret_cast<const Head*>(PyBytes_AS_STRING(arguments[0]));
    const auto* tensors = reinterpret_cast<const Kept*>(head + 1);
    const auto* words = reinterpret_cast<const int64_t*>(tensors + head->tensors);
    const int64_t* numbers = words + head->words;
    Comparison kept{words, numbers}, quick{numbers, numbers + head->numbers};
    const bool unchanged = walk_numbers(arguments[6], arguments[3], quick) && quick.next == quick.end;
    if (!unchanged && (!walk(arguments + 2, kept) || kept.next != kept.end)) Py_RETURN_FALSE;
    // the same objects, so they may be read
    const bool gradients = arguments[1] == Py_True;
    for (int64_t i = 0; i < head->tensors; ++i) {
        if (i + AHEAD < head->tensors) tensors[i + AHEAD].fetch();
        if (!tensors[i].is(const_cast<PyObject*>(tensors[i].object), gradients)) Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
    END_HANDLE_TH_ERRORS
}

// The memory of tensors, which this does not keep alive. A weak reference keeps only the storage object, so that no other one gets its address.
struct Places {
    static constexpr const char* NAME = "saccade_calls.Places";
    std::vector<std::pair<c10::weak_intrusive_ptr<c10::StorageImpl>, const void*>> all;

    bool hold() const {
        for (size_t i = 0; i < all.size(); ++i) {
            if (i + AHEAD < all.size()) __builtin_prefetch(all[i + AHEAD].first._unsafe_get_target());
            if (all[i].first._unsafe_get_target()->data_ptr().get() != all[i].second) return false;  // null once it is freed
        }
        return true;
    }
};

// places_of(tensors): where their memory lies.
PyObject* places_of(PyObject*, PyObject* given) {
    HANDLE_TH_ERRORS
    TORCH_CHECK(PyList_Check(given), "places_of takes a list of tensors");
    auto found = std::make_unique<Places>();
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(given); ++i) {
        TORCH_CHECK(THPVariable_Check(PyList_GET_ITEM(given, i)), "places_of takes a list of tensors");
        const at::Tensor& tensor = THPVariable_Unpack(PyList_GET_ITEM(given, i));
        if (!tensor.has_storage() || !tensor.storage()) continue;
        const c10::Storage& storage = tensor.storage();
        const bool seen = !found->all.empty() && found->all.back().first._unsafe_get_target() == storage.unsafeGetStorageImpl();
        if (!seen) found->all.emplace_back(storage.getWeakStorageImpl(), storage.data());
    }
    return PyCapsule_New(found.release(), Places::NAME, [](PyObject* capsule) {
        delete static_cast<Places*>(PyCapsule_GetPointer(capsule, Places::NAME));
    });
    END_HANDLE_TH_ERRORS
}

// hold(places): whether all of that memory is allocated, and none has moved.
PyObject* hold(PyObject*, PyObject* given) {
    const auto* places = static_cast<const Places*>(PyCapsule_GetPointer(given, Places::NAME));
    return places ? PyBool_FromLong(places->hold()) : nullptr;
}

}  // namespace
