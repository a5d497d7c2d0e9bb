/* Preloaded into the gate by tests: the name several.test has the addresses that NAMES_SEVERAL lists, with a comma behind
   each. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netdb.h>
#include <stdlib.h>
#include <string.h>

#define NEXT(name) static __typeof__(name) *next; if (!next) next = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

int getaddrinfo(const char *restrict node, const char *restrict service, const struct addrinfo *restrict hints,
                struct addrinfo **restrict found) {
    NEXT(getaddrinfo);
    const char *list = getenv("NAMES_SEVERAL");
    if (!node || !list || strcmp(node, "several.test") != 0) return next(node, service, hints, found);
    struct addrinfo *first = NULL, **end = &first;
    for (const char *comma; (comma = strchr(list, ',')); list = comma + 1) {
        char address[64] = "";
        if ((size_t)(comma - list) >= sizeof address) return EAI_FAIL;
        memcpy(address, list, (size_t)(comma - list));
        /* freeaddrinfo frees each by itself. */
        int failed = next(address, service, hints, end);
        if (failed) return failed;
        while (*end) end = &(*end)->ai_next;
    }
    *found = first;
    return first ? 0 : EAI_NONAME;
}
