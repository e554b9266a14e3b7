/* A stranger's engine: two sequences that share a prefix in an arena of its own, attention over both, all without the GIL. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>

#include <pagedkv/pagedkv.h>

static const pkv_api *pkv;

/* Room for n more tokens of s and their K and V: new pages, and a page of its own where the last one is shared. */
static int64_t append(pkv_seq *s, pkv_kv_pages *p, int64_t n, const float *k, const float *v) {
    int64_t start = s->n_tokens, status = PKV_OK;
    int64_t n_pages = (start + n + p->page_tokens - 1) / p->page_tokens - s->n_pages_used;
    if (start % p->page_tokens) status = pkv->seq_write_page(s, start / p->page_tokens);
    if (status >= 0) status = pkv->seq_append_pages(s, n_pages);
    if (status >= 0) status = pkv->kv_write(p, s->page_indices, 0, start, n, k, v);
    if (status >= 0) s->n_tokens += n;
    return status;
}

/* fork_and_attend(format, page_tokens, n_heads, n_kv_heads, head_dim, window, n_prefix, n_own, k, v, q) -> (status, output of
 * the original, output of the fork, pages in use)
 * k, v hold n_prefix + 2 * n_own tokens, float32: the prefix, what the original appends, what its fork appends. q holds queries
 * of the last n_own tokens. */
static PyObject *fork_and_attend(PyObject *self, PyObject *args) {
    long long format, page_tokens, n_heads, n_kv_heads, head_dim, window, n_prefix, n_own;
    Py_buffer k, v, q;
    pkv_arena *arena = NULL;
    pkv_seq *seqs[2] = {NULL, NULL};
    PyObject *outputs[2], *result;
    int64_t status, in_use = -1, n;
    (void)self;
    if (!PyArg_ParseTuple(args, "LLLLLLLLy*y*y*", &format, &page_tokens, &n_heads, &n_kv_heads, &head_dim, &window, &n_prefix,
                          &n_own, &k, &v, &q))
        return NULL;
    for (int i = 0; i < 2; i++) outputs[i] = PyBytes_FromStringAndSize(NULL, q.len);

    Py_BEGIN_ALLOW_THREADS
    const float *kf = k.buf, *vf = v.buf;
    n = n_kv_heads * head_dim;
    pkv_kv_pages pages = {.n_layers = 1, .n_kv_heads = n_kv_heads, .head_dim = head_dim, .page_tokens = page_tokens,
                          .format = format};
    pkv_attention how = {.n_heads = n_heads, .window = window, .scale = 1.0f / sqrtf((float)head_dim)};
    status = pkv->kv_page_bytes(&pages);
    if (status > 0) status = pkv->arena_new(&arena, 64, status, 0, 0, PKV_ARENA_GUARD);
    if (status == PKV_OK) {
        pages.storage = arena->storage;
        pages.page_stride = arena->page_stride;
        status = pkv->seq_new(&seqs[0], arena, 1, 64);
    }
    if (status == PKV_OK) status = append(seqs[0], &pages, n_prefix, kf, vf);
    if (status == PKV_OK) status = pkv->seq_snapshot(&seqs[1], seqs[0]);
    for (int i = 0; i < 2 && status == PKV_OK; i++) {
        int64_t at = (n_prefix + i * n_own) * n;
        status = append(seqs[i], &pages, n_own, kf + at, vf + at);
    }
    for (int i = 0; i < 2 && status == PKV_OK; i++)
        status = pkv->kv_attend(&pages, seqs[i]->page_indices, 0, seqs[i]->n_tokens, n_own, &how, q.buf,
                                (float *)PyBytes_AS_STRING(outputs[i]));
    if (arena != NULL) in_use = pkv->arena_n_in_use(arena);
    if (status == PKV_OK) status = -pkv->check(arena, 3, NULL, 0);
    Py_END_ALLOW_THREADS

    for (int i = 0; i < 2; i++) pkv->seq_destroy(seqs[i]);
    pkv->arena_destroy(arena);
    PyBuffer_Release(&k);
    PyBuffer_Release(&v);
    PyBuffer_Release(&q);
    result = Py_BuildValue("LNNL", (long long)status, outputs[0], outputs[1], (long long)in_use);
    return result;
}

static PyMethodDef methods[] = {
    {"fork_and_attend", fork_and_attend, METH_VARARGS, "Share a prefix, append on both sides, attend."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "ownpages", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_ownpages(void) {
    pkv = pkv_import();
    return pkv == NULL ? NULL : PyModule_Create(&module);
}
