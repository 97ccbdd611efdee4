/* Decodes given documents token by token with llama.cpp's own library, and times each token by itself: the same
 * question that engine/harness.py asks the engine. The tokens are the documents' own (forced), so every program decodes
 * the same ones, and the loss of the token that follows is taken from the logits.
 *
 *     llama_decode MODEL.gguf DOCUMENTS THREADS LOAD_MODE
 *
 * DOCUMENTS: a line a document, its token ids. LOAD_MODE: as llama.cpp's --load-mode. Everything else is the library's
 * default. Standard output: a line a token, `document seconds loss`; before the second document and at the end
 * `bytes N`, what the process has had the disk read so far. One line on standard error and status 1 where it fails.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "llama.h"

enum { CONTEXT = 1024, LINE = 1 << 16 };

static void quiet(enum ggml_log_level level, const char * text, void * data) {
    (void) data;
    if (level == GGML_LOG_LEVEL_ERROR) {
        fputs(text, stderr);
    }
}

static void fail(const char * what) {
    fprintf(stderr, "llama_decode: %s\n", what);
    exit(1);
}

static double now_s(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}

static double loss_of(const float * logits, int count, llama_token target) {
    double largest = logits[0], total = 0;
    for (int i = 1; i < count; i++) {
        largest = fmax(largest, logits[i]);
    }
    for (int i = 0; i < count; i++) {
        total += exp(logits[i] - largest);
    }
    return largest + log(total) - logits[target];
}

static void tell_bytes(void) {
    FILE * file = fopen("/proc/self/io", "r");
    long long bytes = -1;
    char line[128];
    while (file && fgets(line, sizeof line, file)) {
        sscanf(line, "read_bytes: %lld", &bytes);
    }
    if (file) {
        fclose(file);
    }
    printf("bytes %lld\n", bytes);
}

static int read_ids(char * line, llama_token * ids) {
    int count = 0;
    for (char * word = strtok(line, " \n"); word; word = strtok(NULL, " \n")) {
        if (count == CONTEXT) {
            fail("a document longer than the context");
        }
        ids[count++] = atoi(word);
    }
    return count;
}

int main(int argc, char ** argv) {
    if (argc != 5) {
        fail("usage: llama_decode MODEL.gguf DOCUMENTS THREADS LOAD_MODE");
    }
    FILE * documents = fopen(argv[2], "r");
    if (!documents) {
        fail("the documents cannot be read");
    }
    llama_log_set(quiet, NULL);
    llama_backend_init();
    struct llama_model_params how = llama_model_default_params();
    how.load_mode = llama_load_mode_from_str(argv[4]);
    struct llama_model * model = llama_model_load_from_file(argv[1], how);
    if (!model) {
        fail("the model cannot be loaded");
    }
    struct llama_context_params wanted = llama_context_default_params();
    wanted.n_ctx = CONTEXT;
    wanted.n_threads = wanted.n_threads_batch = atoi(argv[3]);
    struct llama_context * context = llama_init_from_model(model, wanted);
    if (!context) {
        fail("no context");
    }
    const int words = llama_vocab_n_tokens(llama_model_get_vocab(model));
    static char line[LINE];
    static llama_token ids[CONTEXT];
    for (int document = 0; fgets(line, sizeof line, documents); document++) {
        const int count = read_ids(line, ids);
        if (document == 1) {
            tell_bytes();
        }
        llama_memory_clear(llama_get_memory(context), true);
        for (int i = 0; i + 1 < count; i++) {
            const double began = now_s();
            if (llama_decode(context, llama_batch_get_one(&ids[i], 1))) {
                fail("a token cannot be decoded");
            }
            const float * logits = llama_get_logits_ith(context, -1); /* waits for the result */
            const double took = now_s() - began;
            printf("%d %.9f %.9f\n", document, took, loss_of(logits, words, ids[i + 1]));
        }
        fflush(stdout);
    }
    tell_bytes();
    return 0;
}
