/* fastcall.c - calls of an operator from PyTorch that look like an earlier one.
 *
 * Python decides what a call means (mneme/torch/_call.py) and leaves the outcome here: the
 * argument struct but for its pointers, and what makes the results. run() compares types, device,
 * shapes and strides of the tensors with the calls it knows, writes pointers into a copy of the
 * struct, makes the results and calls the operator: on the CPU, and on a GPU whose context is at
 * the current stream of PyTorch (mneme/torch/_device.py tells it). Whatever it does not know, it
 * leaves to Python: other streams, recordings of CUDA graphs, calls that autograd must see. ask()
 * is run() for the functions of mneme.torch.ops, with numbers and names of results as a user wrote
 * them.
 *
 * Tensors are read by the C functions of DLPack's exchange table, which PyTorch hands out from 2.10
 * on. Nothing is compiled or linked against PyTorch, and of CPython only the limited API of 3.10 is
 * used: one binary serves all versions of both. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

enum { MOST_INPUTS = 32, MOST_RESULTS = 24, MOST_CALLS = 16, MOST_AXES = 6, MOST_WORDS = 512 };
enum { MOST_GPUS = 16, MOST_WORDINGS = 8, DEFAULT_STREAM = 1 };
enum { SIGNATURE = MOST_INPUTS * (2 + 2 * MOST_AXES) };
enum { DEVICE_CPU = 1, DEVICE_CUDA = 2, CODE_BFLOAT = 4 };

/* ---- DLPack, version 1 ----------------------------------------------------------------------- */

typedef struct {
    void *data;
    int32_t device_type, device_id;
    int32_t ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} dl_tensor;

typedef struct {
    uint32_t major, minor;
    void *earlier;
    void (*managed[3])(void);                          // not used here
    int (*borrow)(void *py_object, dl_tensor *out);    // no reference taken, no waiting
    int (*current_stream)(int device_type, int32_t device_id, void **out);
} dl_exchange;

typedef int (*operator_fn)(void *context, const void *args);

/* ---- what run() knows ------------------------------------------------------------------------ */

/* One earlier call. */
typedef struct {
    int64_t signature[SIGNATURE];
    int n_signature;
    PyObject *params;
    long long wanted;
    uint64_t words[MOST_WORDS];
    int n_results;
    int result_word[MOST_RESULTS];           // -1: not wanted
    PyObject *make[MOST_RESULTS], *given[MOST_RESULTS];
} known_call;

/* Numbers and names of results as given, and what they mean; `type` NULL: one result, `main`. */
typedef struct {
    PyObject *given, *outputs;
    PyObject *params, *type;
    long long wanted;
    int main;
} wording;

typedef struct {
    int n_inputs, n_words, n_calls, n_wordings, next;
    int input_word[MOST_INPUTS];
    operator_fn forward;
    PyObject *calls[MOST_CALLS];             // capsules of known_call, the last one used first
    wording wordings[MOST_WORDINGS];
    PyObject *finish;                        // what makes a call that run() leaves to Python
} known_operator;

/* The tensors of the call at hand. */
typedef struct {
    int64_t signature[SIGNATURE];
    int n_signature;
    void *data[MOST_INPUTS];
    int32_t device_type, device_id;
    bool half;
} seen_call;

/* A GPU whose context makes calls on `stream`, under a lock of Python's. */
typedef struct {
    void *handle;
    unsigned long long stream;
    bool full;                               // it holds more memory for work than may stay
    bool only;                               // PyTorch sees no other: it is the current one
    bool tells_stream;                       // the exchange table does
    PyObject *index, *acquire, *release, *trim;
} known_gpu;

static const char OPERATOR[] = "mneme.operator", CALL[] = "mneme.call";

/* From setup(); they live as long as the process. */
static const dl_exchange *exchange;
static PyTypeObject *tensor_type, *parameter_type;
static PyObject *grad_enabled, *autocast_enabled, *cuda, *current_device, *watchers;
static PyObject *stream_of, *recording, *any_autocast, *requires_grad, *cpu_context;
static newfunc new_tuple;
static known_gpu gpus[MOST_GPUS];

/* Whether a function without arguments gives None, False or 0; -1 on an error. */
static int gives_nothing(PyObject *function) {
    PyObject *value = PyObject_CallNoArgs(function);
    if (!value) return -1;
    const int truth = PyObject_IsTrue(value);
    Py_DECREF(value);
    return truth < 0 ? -1 : !truth;
}

/* 1 when no mode and no transformation sees the calls of this thread. */
static int nobody_looks(void) {
    const Py_ssize_t n = PyTuple_Size(watchers);
    for (Py_ssize_t i = 0; i < n; i++) {
        const int nothing = gives_nothing(PyTuple_GetItem(watchers, i));
        if (nothing != 1) return nothing;
    }
    return 1;
}

/* Adds one tensor; 0 when run() does not serve it. */
static int look_at(seen_call *seen, int i, PyObject *x) {
    dl_tensor view;
    if (x == Py_None) {
        seen->data[i] = NULL;
        seen->signature[seen->n_signature++] = -1;
        return 1;
    }
    if (Py_TYPE(x) != tensor_type && Py_TYPE(x) != parameter_type) return 0;
    if (exchange->borrow(x, &view) != 0) {
        PyErr_Clear();
        return 0;
    }
    if (view.ndim > MOST_AXES) return 0;
    if (view.device_type != DEVICE_CPU && view.device_type != DEVICE_CUDA) return 0;
    if (seen->device_type == 0) {
        seen->device_type = view.device_type, seen->device_id = view.device_id;
        seen->half = view.code == CODE_BFLOAT;
    }
    if (view.device_type != seen->device_type || view.device_id != seen->device_id) return 0;
    int64_t *to = seen->signature + seen->n_signature;
    *to++ = view.ndim | (int64_t)view.code << 8 | (int64_t)view.bits << 16 |
            (int64_t)view.lanes << 32;
    for (int axis = 0; axis < view.ndim; axis++) *to++ = view.shape[axis];
    for (int axis = 0; axis < view.ndim; axis++) *to++ = view.strides ? view.strides[axis] : -1;
    seen->n_signature = (int)(to - seen->signature);
    seen->data[i] = (char *)view.data + view.byte_offset;
    return 1;
}

/* Looks at all tensors of a list or tuple; 0 when run() does not serve them. */
static int look_at_all(seen_call *seen, const known_operator *op, PyObject *tensors) {
    const bool list = PyList_Check(tensors);
    seen->n_signature = 0, seen->device_type = 0, seen->half = false;
    if (!list && !PyTuple_Check(tensors)) return 0;
    if ((list ? PyList_Size(tensors) : PyTuple_Size(tensors)) != op->n_inputs) return 0;
    for (int i = 0; i < op->n_inputs; i++) {
        PyObject *x = list ? PyList_GetItem(tensors, i) : PyTuple_GetItem(tensors, i);
        if (!look_at(seen, i, x)) return 0;
    }
    if (seen->device_type == 0) return 0;
    seen->signature[seen->n_signature++] = (int64_t)seen->device_type << 32 | seen->device_id;
    return 1;
}

/* The known call that is like this one, as a new reference to its capsule; NULL without one. */
static PyObject *find(known_operator *op, const seen_call *seen, PyObject *params,
                      long long wanted) {
    const size_t bytes = (size_t)seen->n_signature * sizeof seen->signature[0];
    for (int i = 0; i < op->n_calls; i++) {
        PyObject *capsule = op->calls[i];
        const known_call *call = PyCapsule_GetPointer(capsule, CALL);
        if (call->n_signature != seen->n_signature || call->wanted != wanted ||
            memcmp(call->signature, seen->signature, bytes) != 0) {
            continue;
        }
        const int same = PyObject_RichCompareBool(call->params, params, Py_EQ);
        if (same < 0) PyErr_Clear();
        if (same == 1) {
            memmove(op->calls + 1, op->calls, (size_t)i * sizeof op->calls[0]);
            op->calls[0] = capsule;
            Py_INCREF(capsule);
            return capsule;
        }
    }
    return NULL;
}

/* 1 where PyTorch is as it was when the call was learnt: no autocast that would round its tensors,
 * and its GPU the current one. */
static int is_at_hand(const seen_call *seen) {
    if (seen->device_type == DEVICE_CPU) return 1;
    const int id = seen->device_id;
    if (id < 0 || id >= MOST_GPUS || !gpus[id].only) {
        PyObject *device = PyObject_CallNoArgs(current_device);
        if (!device) return -1;
        const long index = PyLong_AsLong(device);
        Py_DECREF(device);
        if (index != id) return 0;
    }
    const int none = seen->half ? 1 : gives_nothing(any_autocast);
    if (none != 0) return none;
    PyObject *on = PyObject_CallFunctionObjArgs(autocast_enabled, cuda, NULL);
    if (!on) return -1;
    const int truth = PyObject_IsTrue(on);
    Py_DECREF(on);
    return truth < 0 ? -1 : !truth;
}

/* Whether a gradient will be asked for. */
static int wants_gradient(const known_operator *op, PyObject *tensors) {
    const int nothing = gives_nothing(grad_enabled);
    if (nothing != 0) return nothing < 0 ? -1 : 0;
    const bool list = PyList_Check(tensors);
    for (int i = 0; i < op->n_inputs; i++) {
        PyObject *x = list ? PyList_GetItem(tensors, i) : PyTuple_GetItem(tensors, i);
        if (x == Py_None) continue;
        PyObject *wants = PyObject_GetAttr(x, requires_grad);
        if (!wants) return -1;
        const bool yes = wants == Py_True;
        Py_DECREF(wants);
        if (yes) return 1;
    }
    return 0;
}

/* The results of a call as a list, their addresses in `words`; None for what is not wanted. */
static PyObject *make_results(const known_call *call, uint64_t *words) {
    PyObject *results = PyList_New(call->n_results);
    for (int i = 0; results && i < call->n_results; i++) {
        PyObject *y = Py_None;
        dl_tensor view;
        if (call->result_word[i] < 0) {
            Py_INCREF(y);
        } else {
            y = PyObject_Call(call->make[i], call->given[i], NULL);
            if (!y || exchange->borrow(y, &view) != 0) {
                Py_XDECREF(y);
                Py_DECREF(results);
                return NULL;
            }
            words[call->result_word[i]] = (uint64_t)((uintptr_t)view.data + view.byte_offset);
        }
        PyList_SetItem(results, i, y);
    }
    return results;
}

/* PyTorch's current stream of a GPU, 0 for the default one. */
static int find_stream(const known_gpu *gpu, unsigned long long *stream) {
    void *at = NULL;
    if (gpu->tells_stream &&
        exchange->current_stream(DEVICE_CUDA, (int32_t)(gpu - gpus), &at) == 0) {
        *stream = (unsigned long long)(uintptr_t)at;
        return 0;
    }
    PyErr_Clear();
    PyObject *number = PyObject_CallFunctionObjArgs(stream_of, gpu->index, NULL);
    if (!number) return -1;
    *stream = PyLong_AsUnsignedLongLong(number);
    Py_DECREF(number);
    return PyErr_Occurred() ? -1 : 0;
}

/* Whether PyTorch launches on the stream of the context and records nothing; -1 on an error. The
 * default stream cannot be recorded. */
static int is_at_stream(const known_gpu *gpu) {
    unsigned long long stream;
    if (find_stream(gpu, &stream) != 0) return -1;
    if ((stream ? stream : DEFAULT_STREAM) != gpu->stream) return 0;
    return stream ? gives_nothing(recording) : 1;
}

static int call_and_drop(PyObject *function) {
    PyObject *value = PyObject_CallNoArgs(function);
    if (!value) return -1;
    Py_DECREF(value);
    return 0;
}

/* Calls an operator on a GPU: 1, and its status; 0 where it is left to Python; -1 on an error. The
 * stream is looked at under the lock, which another thread may have held to change it. */
static int launch_on(int index, operator_fn forward, const uint64_t *words, int *status) {
    known_gpu *gpu = index >= 0 && index < MOST_GPUS ? &gpus[index] : NULL;
    if (!gpu || !gpu->handle) return 0;
    if (call_and_drop(gpu->acquire) != 0) return -1;
    int done = is_at_stream(gpu);
    if (done == 1) {
        Py_BEGIN_ALLOW_THREADS
        *status = forward(gpu->handle, words);
        Py_END_ALLOW_THREADS
        if (gpu->full && call_and_drop(gpu->trim) != 0) done = -1;
    }
    if (done < 0) {
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        if (call_and_drop(gpu->release) != 0) PyErr_Clear();
        PyErr_Restore(type, value, trace);
        return -1;
    }
    return call_and_drop(gpu->release) == 0 ? done : -1;
}

/* The context of the CPU of this thread; NULL without one, or on an error. */
static void *find_cpu(void) {
    PyObject *number = PyObject_CallNoArgs(cpu_context);
    void *handle = !number || number == Py_None ? NULL : PyLong_AsVoidPtr(number);
    Py_XDECREF(number);
    return handle;
}

/* What remains once a call is known: the results, or its struct for those who go on in Python. */
static PyObject *carry_out(const known_operator *op, const known_call *call,
                           const seen_call *seen, PyObject *tensors, bool on_gpus) {
    uint64_t words[MOST_WORDS];
    const size_t bytes = (size_t)op->n_words * sizeof words[0];
    const int gradient = wants_gradient(op, tensors);
    if (gradient < 0) return NULL;
    memcpy(words, call->words, bytes);
    for (int i = 0; i < op->n_inputs; i++) {
        words[op->input_word[i]] = (uint64_t)(uintptr_t)seen->data[i];
    }
    PyObject *results = make_results(call, words);
    if (!results) return NULL;
    const int index = seen->device_type == DEVICE_CPU ? -1 : seen->device_id;
    void *handle = !gradient && index < 0 ? find_cpu() : NULL;
    int status = 0, done = handle || !PyErr_Occurred() ? 0 : -1;
    if (handle) {
        Py_BEGIN_ALLOW_THREADS
        status = op->forward(handle, words);
        Py_END_ALLOW_THREADS
        done = 1;
    } else if (!gradient && index >= 0 && on_gpus) {
        done = launch_on(index, op->forward, words, &status);
    }
    if (done == 1 && status == 0) return results;
    if (done == 0) {
        return Py_BuildValue("(y#Nii)", (const char *)words, (Py_ssize_t)bytes, results, index,
                             gradient);
    }
    Py_DECREF(results);
    return done < 0 ? NULL : PyLong_FromLong(status);
}

static known_operator *operator_of(PyObject *capsule) {
    return PyCapsule_GetPointer(capsule, OPERATOR);
}

/* A call that is known, as carry_out() leaves it; None for any other. */
static PyObject *make_known(known_operator *op, PyObject *tensors, PyObject *params,
                            long long wanted, bool on_gpus) {
    seen_call seen;
    if (!look_at_all(&seen, op, tensors)) Py_RETURN_NONE;
    PyObject *capsule = find(op, &seen, params, wanted);
    if (!capsule) Py_RETURN_NONE;
    PyObject *out = NULL;
    const int ready = is_at_hand(&seen);
    if (ready == 1) {
        out = carry_out(op, PyCapsule_GetPointer(capsule, CALL), &seen, tensors, on_gpus);
    } else if (ready == 0) {
        Py_INCREF(Py_None);
        out = Py_None;
    }
    Py_DECREF(capsule);
    return out;
}

/* run(operator, tensors, params, wanted, whether it may call on GPUs): a list of results; or
 * (struct, results, GPU or -1, whether a gradient is wanted) of a call to be made; or a status; or
 * None for a call that is not known. */
static PyObject *run(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    (void)self;
    if (n != 5 || !exchange) Py_RETURN_NONE;
    known_operator *op = operator_of(args[0]);
    if (!op) return NULL;
    const int alone = nobody_looks();
    if (alone < 0) return NULL;
    if (!alone) Py_RETURN_NONE;
    const long long wanted = PyLong_AsLongLong(args[3]);
    if (wanted == -1 && PyErr_Occurred()) return NULL;
    return make_known(op, args[1], args[2], wanted, args[4] == Py_True);
}

/* ---- calls as they are written --------------------------------------------------------------- */

/* Whether Python finds them equal; what cannot be compared is not. */
static bool are_equal(PyObject *a, PyObject *b) {
    const int equal = PyObject_RichCompareBool(a, b, Py_EQ);
    if (equal < 0) PyErr_Clear();
    return equal == 1;
}

/* Whether both tuples hold the same numbers, of the same types. */
static bool same_numbers(PyObject *a, PyObject *b) {
    const Py_ssize_t n = PyTuple_Size(a);
    if (n < 0 || PyTuple_Size(b) != n) return false;
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *x = PyTuple_GetItem(a, i), *y = PyTuple_GetItem(b, i);
        if (x == y) continue;
        if (Py_TYPE(x) != Py_TYPE(y) || !are_equal(x, y)) return false;
    }
    return true;
}

static const wording *find_wording(const known_operator *op, PyObject *given, PyObject *outputs) {
    for (int i = 0; i < op->n_wordings; i++) {
        const wording *w = &op->wordings[i];
        const bool same = w->outputs == outputs ||
                          (PyTuple_Check(outputs) && are_equal(w->outputs, outputs));
        if (same && same_numbers(w->given, given)) return w;
    }
    return NULL;
}

/* One result, or the named tuple of all; takes the list. */
static PyObject *name_results(const wording *w, PyObject *results) {
    PyObject *out = NULL;
    if (!w->type) {
        out = PyList_GetItem(results, w->main);
        Py_XINCREF(out);
    } else {
        PyObject *values = PyList_AsTuple(results), *args = values ? PyTuple_Pack(1, values) : NULL;
        if (args) out = new_tuple((PyTypeObject *)w->type, args, NULL);
        Py_XDECREF(args);
        Py_XDECREF(values);
    }
    Py_DECREF(results);
    return out;
}

/* ask(operator, tensors, numbers, names of results): what a function of mneme.torch.ops gives, or
 * None for a call that is not known. */
static PyObject *ask(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    (void)self;
    if (n != 4 || !exchange) Py_RETURN_NONE;
    known_operator *op = operator_of(args[0]);
    if (!op) return NULL;
    const wording *w = find_wording(op, args[2], args[3]);
    if (!w) Py_RETURN_NONE;
    const int alone = nobody_looks();
    if (alone < 0) return NULL;
    if (!alone) Py_RETURN_NONE;
    const wording is = *w;    // what finish() runs may learn other wordings
    Py_INCREF(is.params);
    Py_XINCREF(is.type);
    PyObject *out = make_known(op, args[1], is.params, is.wanted, true);
    if (out && out != Py_None && !PyList_Check(out)) {
        PyObject *made = out;
        out = PyObject_CallFunction(op->finish, "OOLO", args[1], is.params, is.wanted, made);
        Py_DECREF(made);
    }
    if (out && out != Py_None) out = name_results(&is, out);
    Py_DECREF(is.params);
    Py_XDECREF(is.type);
    return out;
}

static void forget_wording(wording *w) {
    Py_XDECREF(w->given);
    Py_XDECREF(w->outputs);
    Py_XDECREF(w->params);
    Py_XDECREF(w->type);
}

/* means(operator, numbers, names of results, params, wanted, type of the results or None, which one
 * otherwise, what makes a call that is left to Python): what ask() takes them for. */
static PyObject *means(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *capsule, *finish;
    wording w = { .type = NULL };
    if (!PyArg_ParseTuple(args, "OO!OO!LOiO", &capsule, &PyTuple_Type, &w.given, &w.outputs,
                          &PyTuple_Type, &w.params, &w.wanted, &w.type, &w.main, &finish)) {
        return NULL;
    }
    known_operator *op = operator_of(capsule);
    if (!op) return NULL;
    if (w.outputs != Py_None && !PyTuple_Check(w.outputs)) Py_RETURN_NONE;    // it may change
    if (find_wording(op, w.given, w.outputs)) Py_RETURN_NONE;
    if (w.type == Py_None) w.type = NULL;
    Py_INCREF(w.given);
    Py_INCREF(w.outputs);
    Py_INCREF(w.params);
    Py_XINCREF(w.type);
    if (!op->finish) {
        Py_INCREF(finish);
        op->finish = finish;
    }
    const int at = op->n_wordings < MOST_WORDINGS ? op->n_wordings++ : op->next++ % MOST_WORDINGS;
    const wording old = op->wordings[at];
    op->wordings[at] = w;
    forget_wording((wording *)&old);
    Py_RETURN_NONE;
}

/* launch(operator, GPU, struct): the status, or None where it is left to Python. */
static PyObject *launch_struct(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *capsule;
    const char *words;
    Py_ssize_t n_bytes;
    int index, status = 0;
    uint64_t copy[MOST_WORDS];
    if (!PyArg_ParseTuple(args, "Oiy#", &capsule, &index, &words, &n_bytes)) return NULL;
    known_operator *op = operator_of(capsule);
    if (!op) return NULL;
    if (n_bytes != op->n_words * (Py_ssize_t)sizeof(uint64_t)) Py_RETURN_NONE;
    memcpy(copy, words, (size_t)n_bytes);
    const int done = launch_on(index, op->forward, copy, &status);
    if (done < 0) return NULL;
    if (done == 0) Py_RETURN_NONE;
    return PyLong_FromLong(status);
}

/* gpu(index, context, stream, lock's acquire, its release, what gives memory back, whether PyTorch
 * sees no other): tells of a GPU; it stays known while the process lives. Its context was made on
 * the current stream, which the exchange table has to tell alike to be asked later. */
static PyObject *tell_gpu(PyObject *self, PyObject *args) {
    (void)self;
    int index, only;
    unsigned long long handle, stream;
    PyObject *acquire, *release, *trim;
    if (!PyArg_ParseTuple(args, "iKKOOOp", &index, &handle, &stream, &acquire, &release, &trim,
                          &only)) {
        return NULL;
    }
    if (index < 0 || index >= MOST_GPUS || gpus[index].handle) Py_RETURN_NONE;
    known_gpu *gpu = &gpus[index];
    gpu->index = PyLong_FromLong(index);
    if (!gpu->index) return NULL;
    Py_INCREF(acquire);
    Py_INCREF(release);
    Py_INCREF(trim);
    gpu->stream = stream, gpu->acquire = acquire, gpu->release = release, gpu->trim = trim;
    gpu->handle = (void *)(uintptr_t)handle;
    gpu->only = only != 0;
    void *at = NULL;
    gpu->tells_stream = exchange && exchange->current_stream &&
                        exchange->current_stream(DEVICE_CUDA, index, &at) == 0 &&
                        (at ? (uintptr_t)at : DEFAULT_STREAM) == stream;
    PyErr_Clear();
    Py_RETURN_NONE;
}

/* gpu_is(index, stream, full): what has changed. */
static PyObject *tell_change(PyObject *self, PyObject *args) {
    (void)self;
    int index, full;
    unsigned long long stream;
    if (!PyArg_ParseTuple(args, "iKp", &index, &stream, &full)) return NULL;
    if (index >= 0 && index < MOST_GPUS) gpus[index].stream = stream, gpus[index].full = full;
    Py_RETURN_NONE;
}

/* ---- learning -------------------------------------------------------------------------------- */

static void forget_call(PyObject *capsule) {
    known_call *call = PyCapsule_GetPointer(capsule, CALL);
    Py_XDECREF(call->params);
    for (int i = 0; i < call->n_results; i++) {
        Py_XDECREF(call->make[i]);
        Py_XDECREF(call->given[i]);
    }
    PyMem_Free(call);
}

/* Reads results ((word, function, its arguments) or None for each) into `call`. */
static bool read_results(known_call *call, const known_operator *op, PyObject *results) {
    const Py_ssize_t n = PyTuple_Size(results);
    if (n < 0 || n > MOST_RESULTS) return false;
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *row = PyTuple_GetItem(results, i), *make, *given;
        call->result_word[i] = -1;
        call->n_results = (int)i + 1;
        if (row == Py_None) continue;
        if (!PyArg_ParseTuple(row, "iOO", &call->result_word[i], &make, &given)) return false;
        if (call->result_word[i] < 0 || call->result_word[i] >= op->n_words) return false;
        Py_INCREF(make);
        Py_INCREF(given);
        call->make[i] = make, call->given[i] = given;
    }
    return true;
}

/* Puts a call in front, where the one that was not used for longest makes room. */
static void remember(known_operator *op, PyObject *capsule) {
    if (op->n_calls == MOST_CALLS) Py_DECREF(op->calls[--op->n_calls]);
    memmove(op->calls + 1, op->calls, (size_t)op->n_calls * sizeof op->calls[0]);
    op->calls[0] = capsule;
    op->n_calls++;
}

/* learn(operator, tensors, params, wanted, struct, results): whether run() serves such a call. */
static PyObject *learn(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *capsule, *tensors, *params, *results;
    const char *words;
    Py_ssize_t n_bytes;
    long long wanted;
    seen_call seen;
    if (!PyArg_ParseTuple(args, "OOOLy#O", &capsule, &tensors, &params, &wanted, &words, &n_bytes,
                          &results)) {
        return NULL;
    }
    known_operator *op = operator_of(capsule);
    if (!op) return NULL;
    if (!exchange || !look_at_all(&seen, op, tensors)) Py_RETURN_FALSE;
    if (n_bytes != op->n_words * (Py_ssize_t)sizeof(uint64_t)) Py_RETURN_FALSE;
    known_call *call = PyMem_Calloc(1, sizeof *call);
    if (!call) return PyErr_NoMemory();
    PyObject *made = PyCapsule_New(call, CALL, forget_call);
    if (!made) {
        PyMem_Free(call);
        return NULL;
    }
    Py_INCREF(params);
    call->params = params, call->wanted = wanted, call->n_signature = seen.n_signature;
    memcpy(call->signature, seen.signature, sizeof call->signature);
    memcpy(call->words, words, (size_t)n_bytes);
    if (!read_results(call, op, results)) {
        Py_DECREF(made);
        if (PyErr_Occurred()) return NULL;
        Py_RETURN_FALSE;
    }
    remember(op, made);
    Py_RETURN_TRUE;
}

static void forget_operator(PyObject *capsule) {
    known_operator *op = PyCapsule_GetPointer(capsule, OPERATOR);
    while (op->n_calls > 0) Py_DECREF(op->calls[--op->n_calls]);
    while (op->n_wordings > 0) forget_wording(&op->wordings[--op->n_wordings]);
    Py_XDECREF(op->finish);
    PyMem_Free(op);
}

/* operator(address of the C function, words of its struct, words of its inputs): what run() takes,
 * or None for an operator that is too large for it. */
static PyObject *new_operator(PyObject *self, PyObject *args) {
    (void)self;
    unsigned long long forward;
    int n_words;
    PyObject *words;
    if (!PyArg_ParseTuple(args, "KiO!", &forward, &n_words, &PyTuple_Type, &words)) return NULL;
    const Py_ssize_t n = PyTuple_Size(words);
    if (n > MOST_INPUTS || n_words > MOST_WORDS) Py_RETURN_NONE;
    known_operator *op = PyMem_Calloc(1, sizeof *op);
    if (!op) return PyErr_NoMemory();
    op->n_words = n_words, op->n_inputs = (int)n;
    op->forward = (operator_fn)(uintptr_t)forward;
    for (Py_ssize_t i = 0; i < n; i++) {
        const long word = PyLong_AsLong(PyTuple_GetItem(words, i));
        if (word < 0 || word >= n_words) {
            PyMem_Free(op);
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a word outside the struct");
            return NULL;
        }
        op->input_word[i] = (int)word;
    }
    PyObject *capsule = PyCapsule_New(op, OPERATOR, forget_operator);
    if (!capsule) PyMem_Free(op);
    return capsule;
}

/* setup(exchange table, Tensor, Parameter, is_grad_enabled, is_autocast_enabled, whether any
 * autocast is, current device, stream of a device, whether it records, context of the CPU or None,
 * watchers): whether this file knows the table. */
static PyObject *setup(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *table, *tensor, *parameter;
    if (!PyArg_ParseTuple(args, "OOOOOOOOOOO!", &table, &tensor, &parameter, &grad_enabled,
                          &autocast_enabled, &any_autocast, &current_device, &stream_of,
                          &recording, &cpu_context, &PyTuple_Type, &watchers)) {
        return NULL;
    }
    const dl_exchange *found = PyCapsule_GetPointer(table, "dlpack_exchange_api");
    if (!found) return NULL;
    while (found && found->major != 1) found = found->earlier;
    if (!found || !found->borrow) Py_RETURN_FALSE;
    cuda = PyUnicode_FromString("cuda");
    requires_grad = PyUnicode_InternFromString("requires_grad");
    if (!cuda || !requires_grad) return NULL;
    new_tuple = (newfunc)PyType_GetSlot(&PyTuple_Type, Py_tp_new);
    if (!new_tuple) return NULL;
    tensor_type = (PyTypeObject *)tensor, parameter_type = (PyTypeObject *)parameter;
    Py_INCREF(tensor);
    Py_INCREF(parameter);
    Py_INCREF(grad_enabled);
    Py_INCREF(autocast_enabled);
    Py_INCREF(any_autocast);
    Py_INCREF(current_device);
    Py_INCREF(stream_of);
    Py_INCREF(recording);
    Py_INCREF(cpu_context);
    Py_INCREF(watchers);
    exchange = found;
    Py_RETURN_TRUE;
}

static PyMethodDef methods[] = {
    { "setup", setup, METH_VARARGS, "Tells what belongs to PyTorch." },
    { "operator", new_operator, METH_VARARGS, "An operator without known calls." },
    { "learn", learn, METH_VARARGS, "Remembers a call." },
    { "gpu", tell_gpu, METH_VARARGS, "Tells of a GPU." },
    { "gpu_is", tell_change, METH_VARARGS, "Tells what changed on a GPU." },
    { "launch", launch_struct, METH_VARARGS, "Makes a call on a GPU whose struct is filled in." },
    { "run", (PyCFunction)(void (*)(void))run, METH_FASTCALL, "Makes a call that is known." },
    { "ask", (PyCFunction)(void (*)(void))ask, METH_FASTCALL, "Makes it as it was written." },
    { "means", means, METH_VARARGS, "Remembers how a call was written." },
    { NULL, NULL, 0, NULL },
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_fastcall", "Calls that look like an earlier one.", -1, methods,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__fastcall(void);
PyMODINIT_FUNC PyInit__fastcall(void) {
    return PyModule_Create(&module);
}
