# train_fox: see `make help`
.DEFAULT_GOAL := help
SHELL := /bin/sh

CC      ?= gcc
VERSION := $(shell git describe --always --dirty 2>/dev/null || echo unknown)
# The machine's own vector instructions, without which matrix products run several times slower. -fno-math-errno lets
# sqrt vectorise; -ffast-math is not an option, as it would compile the checks for NaN away.
ARCH    ?= -march=native
WARN    := -Wall -Wextra -Wshadow
CFLAGS  := -std=gnu11 -D_GNU_SOURCE -O3 $(ARCH) -fno-math-errno -fopenmp $(WARN) $(EXTRA_CFLAGS)
LDLIBS  := -lm -lpthread
SANITIZE := -std=gnu11 -D_GNU_SOURCE -O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined \
            -fno-sanitize-recover=all -fopenmp $(WARN) $(EXTRA_CFLAGS)

# BLAS=openblas computes large products through OpenBLAS, BLAS=none through our own; by default, what is installed.
BLAS    ?= $(shell printf '\#include <cblas.h>\nint main(void) { openblas_set_num_threads(1); return 0; }\n' | \
             $(CC) -xc - -o /dev/null -lopenblas 2>/dev/null && echo openblas || echo none)
ifeq ($(BLAS),openblas)
BLAS_FLAGS := -DUSE_OPENBLAS
BLAS_LIBS  := -lopenblas
endif

HEADERS := $(wildcard llmc/*.h)
TRAINER := -DCODE_VERSION='"$(VERSION)"' $(BLAS_FLAGS)
