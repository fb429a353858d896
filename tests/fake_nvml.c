/* A driver's library with GPUs from the text file FAKE_NVML, read anew by nvmlInit and for clocks, energy and processes.
 *
 *   error|CODE                    nvmlInit gives CODE
 *   driver|VERSION
 *   gpu|UUID|QUERY=ANSWER|...     a GPU; a query without an answer is not supported, ANSWER !CODE is that error
 *   mig|UUID|QUERY=ANSWER|...     a slice of the last GPU
 *   app|UUID|PID|BYTES            a process on the GPU or slice
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, ABSENT = 12 };
enum { MOST = 64, LETTERS = 1024 };
typedef struct { char uuid[96], answers[LETTERS]; int card; } Gpu;
typedef struct { char uuid[96]; unsigned pid; unsigned long long bytes; } App;
typedef struct { unsigned pid; unsigned long long bytes; unsigned gpu_instance, compute_instance; } Row;

static Gpu gpus[MOST];
static App apps[MOST];
static char driver[96];
static int num_gpus, num_apps, open_count;

static int answer(const Gpu *gpu, const char *query, char *value) {
    char text[LETTERS], *rest, *part;
    strcpy(text, gpu->answers);
    for (part = strtok_r(text, "|", &rest); part; part = strtok_r(NULL, "|", &rest)) {
        char *equals = strchr(part, '=');
        if (!equals || strncmp(part, query, equals - part) || query[equals - part]) continue;
        if (equals[1] == '!') return atoi(equals + 2);
        strcpy(value, equals + 1);
        return OK;
    }
    return NOT_SUPPORTED;
}

static int text_answer(const Gpu *gpu, const char *query, char *out, unsigned length) {
    char value[LETTERS];
    int code = answer(gpu, query, value);
    if (code == OK) snprintf(out, length, "%s", value);
    return code;
}

static int load(void) {
    char line[LETTERS];
    const char *path = getenv("FAKE_NVML");
    FILE *file = path ? fopen(path, "r") : NULL;
    if (!file) return ABSENT;
    num_gpus = num_apps = 0;
    int code = OK, card = -1;
    while (fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        char *bar = strchr(line, '|');
        if (!bar) continue;
        *bar++ = 0;
        char *next = strchr(bar, '|');
        if (next) *next++ = 0;
        if (!strcmp(line, "error")) code = atoi(bar);
        if (!strcmp(line, "driver")) strcpy(driver, bar);
        if (!strcmp(line, "app")) {
            App *app = &apps[num_apps++];
            strcpy(app->uuid, bar);
            sscanf(next, "%u|%llu", &app->pid, &app->bytes);
        }
        if (!strcmp(line, "gpu") || !strcmp(line, "mig")) {
            Gpu *gpu = &gpus[num_gpus];
            strcpy(gpu->uuid, bar);
            strcpy(gpu->answers, next ? next : "");
            if (line[0] == 'g') card = num_gpus;
            gpu->card = line[0] == 'g' ? -1 : card;
            num_gpus++;
        }
    }
    fclose(file);
    return code;
}

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    int code = load();
    open_count += code == OK;
    return code;
}

int nvmlShutdown(void) { return open_count > 0 ? (open_count--, OK) : UNINITIALIZED; }
const char *nvmlErrorString(int code) { static char text[32]; sprintf(text, "error %d", code); return text; }
int nvmlSystemGetDriverVersion(char *out, unsigned length) { snprintf(out, length, "%s", driver); return OK; }

static Gpu *place(int parent, unsigned index) {
    for (int i = 0; i < num_gpus; i++)
        if (gpus[i].card == parent && !index--) return &gpus[i];
    return NULL;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    for (*count = 0; place(-1, *count); (*count)++) {}
    return open_count ? OK : UNINITIALIZED;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Gpu **out) { return (*out = place(-1, index)) ? OK : NOT_FOUND; }
int nvmlDeviceGetUUID(Gpu *gpu, char *out, unsigned length) { snprintf(out, length, "%s", gpu->uuid); return OK; }
int nvmlDeviceGetName(Gpu *gpu, char *out, unsigned length) { return text_answer(gpu, "Name", out, length); }
int nvmlDeviceGetSerial(Gpu *gpu, char *out, unsigned length) { return text_answer(gpu, "Serial", out, length); }

int nvmlDeviceGetMemoryInfo(Gpu *gpu, unsigned long long *out) {
    char value[LETTERS];
    int code = answer(gpu, "MemoryInfo", value);
    if (code == OK) {
        sscanf(value, "%llu/%llu", &out[2], &out[0]);
        out[1] = out[0] - out[2];
    }
    return code;
}

int nvmlDeviceGetCudaComputeCapability(Gpu *gpu, int *major, int *minor) {
    char value[LETTERS];
    int code = answer(gpu, "CudaComputeCapability", value);
    if (code == OK) sscanf(value, "%d.%d", major, minor);
    return code;
}

static int number(Gpu *gpu, const char *query, unsigned *out) {
    char value[LETTERS];
    int code = answer(gpu, query, value);
    if (code == OK) *out = atoi(value);
    return code;
}

int nvmlDeviceGetDisplayActive(Gpu *gpu, unsigned *out) { return number(gpu, "DisplayActive", out); }

int nvmlDeviceGetClockInfo(Gpu *gpu, int kind, unsigned *out) {
    load();
    return kind == 1 ? number(gpu, "ClockInfo", out) : INVALID;
}

int nvmlDeviceGetTotalEnergyConsumption(Gpu *gpu, unsigned long long *out) {
    char value[LETTERS];
    load();
    int code = answer(gpu, "TotalEnergyConsumption", value);
    if (code == OK) *out = strtoull(value, NULL, 10);
    return code;
}

int nvmlDeviceGetMaxMigDeviceCount(Gpu *gpu, unsigned *out) { (void)gpu; *out = 7; return OK; }

int nvmlDeviceGetMigMode(Gpu *gpu, unsigned *current, unsigned *pending) {
    int code = number(gpu, "MigMode", current);
    *pending = *current;
    return code;
}

int nvmlDeviceGetMigDeviceHandleByIndex(Gpu *gpu, unsigned index, Gpu **out) {
    return (*out = place((int)(gpu - gpus), index)) ? OK : NOT_FOUND;
}

int nvmlDeviceGetComputeRunningProcesses_v3(Gpu *gpu, unsigned *count, Row *rows) {
    char value[LETTERS];
    load();
    int code = answer(gpu, "ComputeRunningProcesses", value);
    if (code != OK) return code;
    unsigned there = 0, room = *count;
    for (int i = 0; i < num_apps; i++) {
        if (strcmp(apps[i].uuid, gpu->uuid)) continue;
        if (rows && there < room) rows[there] = (Row){apps[i].pid, apps[i].bytes, -1, -1};
        there++;
    }
    *count = there;
    return there > room ? TOO_SMALL : OK;
}
