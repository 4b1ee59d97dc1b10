// The real tokens of a padded batch on the host, in one pass: 2 us for 8 sentences, where numpy takes 50.
#pragma once

#include <Python.h>
#include <vector>
#include <ATen/ops/empty.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

namespace {

// A table `[rows, columns]` of int64, whose rows may be one and lie apart; its columns lie side by side.
struct Table {
    const int64_t* numbers = nullptr;
    int64_t stride = 0;

    const int64_t* row(int64_t i) const { return numbers ? numbers + i * stride : nullptr; }
};

// False for what Python has to handle: another dtype, device, shape or layout.
bool read_table(PyObject* given, int64_t rows, int64_t columns, Table& table) {
    if (given == Py_None) return true;
    if (!THPVariable_Check(given)) return false;
    const at::Tensor& tensor = THPVariable_Unpack(given);
    if (!tensor.is_cpu() || tensor.scalar_type() != at::kLong || tensor.layout() != at::kStrided || tensor.dim() != 2) return false;
    if ((tensor.size(0) != rows && tensor.size(0) != 1) || tensor.size(1) != columns || (columns > 1 && tensor.stride(1) != 1)) return false;
    table = {tensor.const_data_ptr<int64_t>(), tensor.size(0) == 1 ? 0 : tensor.stride(0)};
    return true;
}

// pack(ids, mask, types, positions, padding, counted, reads_first): (numbers, ends, longest, used) as `encoders.packing` describes them, or None for
// what is not int64 on the host.
PyObject* pack(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK(count == 7 && THPVariable_Check(arguments[0]), "pack takes ids, mask, types, positions, padding, counted, reads_first");
    const at::Tensor& first = THPVariable_Unpack(arguments[0]);
    if (first.dim() != 2) Py_RETURN_NONE;
    const int64_t rows = first.size(0), columns = first.size(1), padding = PyLong_AsLongLong(arguments[4]);
    const bool counted = arguments[5] == Py_True, reads_first = arguments[6] == Py_True;
    Table ids, mask, types, positions;
    if (!read_table(arguments[0], rows, columns, ids) || !read_table(arguments[1], rows, columns, mask)) Py_RETURN_NONE;
    if (!read_table(arguments[2], rows, columns, types) || !read_table(arguments[3], rows, columns, positions)) Py_RETURN_NONE;
    at::Tensor ends = at::empty({rows + 1}, at::kInt);
    int32_t* end = ends.mutable_data_ptr<int32_t>();
    int64_t tokens = 0, longest = 0;
    bool used = false;
    end[0] = 0;
    std::vector<int64_t> lasts(rows);  // columns of a row up to its last real token
    for (int64_t i = 0; i < rows; ++i) {
        const int64_t *id = ids.row(i), *real = mask.row(i);
        int64_t last = columns, here = real ? 0 : columns, hidden = 0;
        for (; real && last > 0 && !real[last - 1]; --last) hidden += id[last - 1] != padding;
        for (int64_t j = 0; real && j < last; ++j) {
            here += real[j] != 0;
            hidden += (real[j] == 0) & (id[j] != padding);
        }
        lasts[i] = last;
        used |= hidden > 0 || (reads_first && here && real && !real[0]);
        longest = std::max(longest, here);
        tokens += here;
        end[i + 1] = static_cast<int32_t>(tokens);
    }
    at::Tensor numbers = at::empty({4, tokens}, at::kLong);
    int64_t* out = numbers.mutable_data_ptr<int64_t>();
    for (int64_t i = 0; i < rows; ++i) {
        const int64_t *id = ids.row(i), *real = mask.row(i), *type = types.row(i), *position = positions.row(i);
        int64_t place = end[i], seen = 0;  // seen: tokens that are no padding, whatever the mask says of them
        for (int64_t j = 0; j < lasts[i]; ++j) {
            seen += id[j] != padding;
            if (real && !real[j]) continue;
            out[place] = id[j];
            out[tokens + place] = position ? position[j] : !counted ? j : id[j] != padding ? seen + padding : padding;
            out[2 * tokens + place] = type ? type[j] : 0;
            out[3 * tokens + place] = i * columns + j;
            ++place;
        }
    }
    return Py_BuildValue("(NNLO)", THPVariable_Wrap(numbers), THPVariable_Wrap(ends), static_cast<long long>(longest), used ? Py_True : Py_False);
    END_HANDLE_TH_ERRORS
}

}  // namespace
