# The passes in which test programs are compiled, to OUT/tests/PASS: as released, with the sanitizers of addresses and undefined behavior, and with that of threads.
PASSES      ?= plain memory thread
PASS_plain  := -O2
PASS_memory := -O1 -fsanitize=address,undefined -fno-sanitize-recover=all
PASS_thread := -O1 -fsanitize=thread
TESTFLAGS   := -D_GNU_SOURCE -g -Wall -Wextra -Werror
