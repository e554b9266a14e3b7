/* A stranger's plain C extension: byte strings in shared pages, all work without the GIL, through pkv_import() alone. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <string.h>

#include <pagedkv/pagedkv.h>

static const pkv_api *pkv;

/* Put n bytes into new pages at the end of s. */
static int64_t put(pkv_seq *s, const char *bytes, int64_t n) {
    pkv_arena *a = s->arena;
    while (n > 0) {
        int64_t chunk = n < a->page_bytes ? n : a->page_bytes;
        int64_t page = pkv->seq_append_page(s);
        if (page < 0) return page;
        memcpy(a->storage + page * a->page_stride, bytes, (size_t)chunk);
        bytes += chunk;
        n -= chunk;
    }
    return PKV_OK;
}

/* The pages of s one after the other, as bytes. */
static PyObject *contents(const pkv_seq *s) {
    const pkv_arena *a = s->arena;
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(s->n_pages_used * a->page_bytes));
    if (bytes == NULL) return NULL;
    for (int64_t k = 0; k < s->n_pages_used; k++)
        memcpy(PyBytes_AS_STRING(bytes) + k * a->page_bytes, a->storage + s->page_indices[k] * a->page_stride,
               (size_t)a->page_bytes);
    return bytes;
}

/* fork(text, page_bytes, n_pages, i, patch): put text into a sequence, snapshot it, overwrite page i of the snapshot with
 * patch. Returns (status, contents of the original, contents of the snapshot, pages in use, violations). */
static PyObject *fork_and_patch(PyObject *self, PyObject *args) {
    const char *text, *patch;
    Py_ssize_t n_text, n_patch;
    long long page_bytes, n_pages, i;
    int64_t status, violations = -1, in_use = -1;
    pkv_arena *arena = NULL;
    pkv_seq *seq = NULL, *copy = NULL;
    PyObject *result = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "y#LLLy#", &text, &n_text, &page_bytes, &n_pages, &i, &patch, &n_patch)) return NULL;
    if (n_patch > page_bytes) return PyErr_Format(PyExc_ValueError, "patch is longer than a page");

    Py_BEGIN_ALLOW_THREADS
    status = pkv->arena_new(&arena, n_pages, page_bytes, 0, 0, PKV_ARENA_GUARD);
    if (status == PKV_OK) status = pkv->seq_new(&seq, arena, 1, 64);
    if (status == PKV_OK) status = put(seq, text, n_text);
    if (status == PKV_OK) status = pkv->seq_snapshot(&copy, seq);
    if (status == PKV_OK) {
        status = pkv->seq_write_page(copy, i);
        if (status >= 0) memcpy(pkv->arena_page(arena, status), patch, (size_t)n_patch);
    }
    if (arena != NULL) {
        violations = pkv->check(arena, 3, NULL, 0);
        in_use = pkv->arena_n_in_use(arena);
    }
    Py_END_ALLOW_THREADS

    if (seq != NULL && copy != NULL)
        result = Py_BuildValue("LNNLL", (long long)status, contents(seq), contents(copy), (long long)in_use,
                               (long long)violations);
    else
        result = Py_BuildValue("LyyLL", (long long)status, "", "", (long long)in_use, (long long)violations);
    pkv->seq_destroy(copy);
    pkv->seq_destroy(seq);
    pkv->arena_destroy(arena);
    return result;
}

/* share(arena_address, sequence_address): bytes of a Python-made sequence, read through a sequence of our own that shares its
 * pages. */
static PyObject *share(PyObject *self, PyObject *args) {
    unsigned long long arena_address, seq_address;
    pkv_seq *theirs, *ours = NULL;
    PyObject *result = NULL;
    int64_t status;
    (void)self;
    if (!PyArg_ParseTuple(args, "KK", &arena_address, &seq_address)) return NULL;
    theirs = (pkv_seq *)(uintptr_t)seq_address;
    status = pkv->seq_new(&ours, (pkv_arena *)(uintptr_t)arena_address, 2, 64);
    if (status == PKV_OK) status = pkv->seq_share_pages(ours, theirs->page_indices, theirs->n_pages_used);
    result = status == PKV_OK ? contents(ours) : PyLong_FromLongLong(status);
    pkv->seq_destroy(ours);
    return result;
}

static PyMethodDef methods[] = {
    {"fork_and_patch", fork_and_patch, METH_VARARGS, "Snapshot, copy on write, compare."},
    {"share", share, METH_VARARGS, "Read a Python sequence's pages from C."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "blobs", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_blobs(void) {
    pkv = pkv_import();
    return pkv == NULL ? NULL : PyModule_Create(&module);
}
