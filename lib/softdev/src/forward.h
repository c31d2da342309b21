/* Functions that this library replaces, and those of the libraries that it forwards to. */
#ifndef SOFTDEV_FORWARD_H
#define SOFTDEV_FORWARD_H

#include <errno.h>

#define EXPORT __attribute__((visibility("default")))

/* Returns a library's function of a name and version. It is found once, when the library is loaded, or else by a handle: the library may have been opened by
 * name, outside of the global scope. */
void *sd_next(void **cache, const char *library, const char *name, const char *version);

/* SD_FORWARD calls a library's function, or gives a value and an errno if the library lacks it. */
#define SD_FORWARD(library, version, missing, name, ...)                                            \
	({                                                                                          \
		static void *cache;                                                                 \
		__typeof__(name) *f = (__typeof__(name) *)sd_next(&cache, library, #name, version); \
		f ? f(__VA_ARGS__) : (errno = EOPNOTSUPP, missing);                                 \
	})

#endif
