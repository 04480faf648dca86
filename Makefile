# train_fox: see `make help`
.DEFAULT_GOAL := help
SHELL := /bin/sh

# The makes that recipes start are given what the shell was asked: it would take longer than they do
PROBES = PROBED=1 $(foreach v,VERSION MPI_COMPILE MPI_LINK MPI_FOUND NCCL_FOUND GPU_ARCHS,$v='$($v)')
ifndef PROBED
VERSION := $(shell git describe --always --dirty 2>/dev/null || echo unknown)
endif
# -march=native: without the machine's vector instructions GEMMs run several times slower. -fno-math-errno
# lets sqrt vectorize, -fno-trapping-math loops that choose between numbers, as exp_real does. -ffast-math is not used: it
# would compile the checks for NaN away.
ARCH    ?= -march=native
WARN    := -Wall -Wextra -Wshadow -Wcast-qual
CFLAGS  := -std=gnu11 -D_GNU_SOURCE -O3 $(ARCH) -fno-math-errno -fno-trapping-math -fopenmp $(WARN) $(EXTRA_CFLAGS)
LDLIBS  := -lm -lpthread
# -Og -g1: -O1 -g compiles for three times as long, and what it makes is as fast with $(ARCH) as -Og's. -Og sees variables
# without a value where there are none.
SANITIZE := -std=gnu11 -D_GNU_SOURCE -Og -g1 $(ARCH) -fno-omit-frame-pointer -fsanitize=address,undefined \
            -fno-sanitize-recover=all -fopenmp $(WARN) -Wno-maybe-uninitialized $(EXTRA_CFLAGS)

# Whether the compiler finds header $1 with flags $2: 1 or 0. \043 is the number sign.
has_header = $(shell printf '\043if !__has_include(<$1>)\n\043error\n\043endif\n' | \
                     $(CC) -xc -E $2 - >/dev/null 2>&1 && echo 1 || echo 0)

# Several ranks need OpenMPI (package libopenmpi-dev) where mpirun starts them. USE_MPI=0: without it, even
# where it is installed. OMPI_SKIP_MPICXX: mpi.h without OpenMPI's C++ classes, which are another library.
ifndef PROBED
MPI_COMPILE := $(shell mpicc --showme:compile 2>/dev/null || pkg-config --cflags ompi-c 2>/dev/null)
MPI_LINK    := $(shell mpicc --showme:link 2>/dev/null || pkg-config --libs ompi-c 2>/dev/null)
MPI_FOUND   := $(call has_header,mpi.h,$(MPI_COMPILE))
endif
USE_MPI     ?= $(MPI_FOUND)
ifeq ($(USE_MPI),1)
ifneq ($(MPI_FOUND),1)
$(error USE_MPI=1, but OpenMPI was not found by mpicc or pkg-config: install libopenmpi-dev, or set USE_MPI=0)
endif
MPI_FLAGS := -DUSE_MPI -DOMPI_SKIP_MPICXX $(patsubst -I%,-isystem %,$(filter -I% -D%,$(MPI_COMPILE)))
MPI_LIBS  := $(MPI_LINK)
endif

# The Python files that checkpoints get, as string literals for llmc/checkpoint/hf/folder.h.
HF_CODE := $(patsubst %,build/%.h,configuration_fox modeling_fox modeling_recurrent modeling_stack)
HEADERS := $(shell find llmc -name '*.h') $(HF_CODE)
CODE    := -DCODE_VERSION='"$(VERSION)"'
TRAINER := $(CODE) $(MPI_FLAGS)
TRAINER_LIBS := $(MPI_LIBS) $(LDLIBS)

# ----------------------------------------------------------------------------
##@ Programs

# What is compiled in a short line; V=1 prints the command.
Q   := $(if $(V),,@)
SAY  = $(if $(V),,@echo 'compile $@')

# A recipe writes a file under a name of its own process, and renames it when it is complete: another make may run in
# this folder.
NEW     = build/$(@F).$$$$.new
PUBLISH = mv -f $(NEW) $@

# Rewritten when the flags change, which triggers a rebuild.
WRITE_FLAGS = @printf '%s\n' "$$FLAGS" >$(NEW) && if cmp -s $(NEW) $@; then rm $(NEW); else $(PUBLISH); fi
build/flags: export FLAGS = $(CC) $(CFLAGS) $(MPI_FLAGS) $(MPI_LIBS)
build/flags: FORCE
	@mkdir -p build
	$(WRITE_FLAGS)

$(HF_CODE): build/%.h: llmc/checkpoint/hf/%.py
	@mkdir -p build
	$(Q)sed 's/[\"]/\\&/g; s/.*/"&\\n"/' $< >$(NEW) && $(PUBLISH)

train_fox: train_fox.c $(HEADERS) build/flags ## the CPU trainer
	$(SAY)
	$(Q)$(CC) $(CFLAGS) $(TRAINER) $< -o $(NEW) $(TRAINER_LIBS) && $(PUBLISH)

data/text_to_shards: data/text_to_shards.c data/input_files.h data/pack.h data/roll.h data/shard_writer.h data/splits.h $(HEADERS) ## converts text files to data shards
	$(SAY)
	$(Q)$(CC) $(CFLAGS) $(CODE) $< -o $(NEW) $(LDLIBS) && $(PUBLISH)

data/ids_to_shards: data/ids_to_shards.c data/pack.h data/roll.h data/shard_writer.h data/splits.h $(HEADERS) ## writes the data shards of scripts/make_shards.py
	$(SAY)
	$(Q)$(CC) $(CFLAGS) $(CODE) $< -o $(NEW) $(LDLIBS) && $(PUBLISH)

data/longcrawl64: data/longcrawl64.c $(wildcard data/*.h) $(HEADERS) ## converts LongCrawl64 to data shards
	$(SAY)
	$(Q)$(CC) $(CFLAGS) $(CODE) $< -o $(NEW) -lcurl -lblosc -lcrypto $(LDLIBS) && $(PUBLISH)

# The GPU trainer is built for the GPUs of this machine, or for all of ARCHS="80 86 89 90 100 120" in one
# binary. PTX of the sm_80 kernels is always included, for GPUs that are not in the list. 90 is compiled as
# 90a: plain sm_90 has no wgmma.
#
# CUDA_HOME: the folder of a CUDA Toolkit that is not in PATH, also site-packages/nvidia/cu13 of NVIDIA's Python
# packages. Those have lib/ in place of lib64/, and libraries under their full names alone.
NVCC      ?= $(if $(CUDA_HOME),$(CUDA_HOME)/bin/nvcc,$(firstword $(shell command -v nvcc) /usr/local/cuda/bin/nvcc))
# nvcc passes -Xlinker on to a shell. The source folder's path may have spaces.
rpath = -Xlinker '-rpath="$(if $(filter /%,$1),,$(CURDIR)/)$1"'
CUDA_LIB  := $(dir $(firstword $(NVCC)))../lib
CUBLAS_LT := $(if $(wildcard $(CUDA_LIB)64),,$(lastword $(sort $(wildcard $(CUDA_LIB)/libcublasLt.so.*))))
# An nvidia-smi that fails says so on standard output.
ifndef PROBED
GPU_ARCHS := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | sed -n 's/^\([0-9]*\)\.\([0-9]\)$$/\1\2/p')
endif
ARCHS     ?= $(or $(sort $(GPU_ARCHS)),80 90)
# -Wno-missing-field-initializers: fields that a named initializer leaves out are 0, as in C, where gcc does not warn.
NVCCFLAGS  = -std=c++17 -O3 -D_GNU_SOURCE --threads 2 -lineinfo \
             $(foreach a,$(patsubst 90,90a,$(ARCHS)),-gencode=arch=compute_$a,code=sm_$a) \
             -gencode=arch=compute_80,code=compute_80 \
             -Xcompiler -Wall,-Wextra,-Wno-missing-field-initializers,-fopenmp $(CUDNN_FLAGS) $(EXTRA_NVCCFLAGS)
CUDA_HEADERS := $(shell find llmc -name '*.cuh')
GPU_CODE      = -DGPU_CODE='"$(patsubst %,sm_%,$(patsubst 90,90a,$(ARCHS))) and PTX of sm_80"'
NEED_NVCC     = @command -v $(firstword $(NVCC)) >/dev/null || { echo "error: nvcc was not found: install the CUDA Toolkit, 12.5 or later" \
                "(\`make check\` tells how), set CUDA_HOME, or set NVCC=/path/to/nvcc" >&2; exit 1; }

# USE_CUDNN=1 adds cuDNN's attention, for models without a forget gate.
ifeq ($(USE_CUDNN),1)
CUDNN_FLAGS := -DUSE_CUDNN
CUDNN_LIBS := -lcudnn
else
WITHOUT_CUDNN := %_cudnn
endif
GPU_LIBS = $(CUDNN_LIBS) $(if $(CUBLAS_LT),-L$(CUDA_LIB) $(call rpath,$(CUDA_LIB)) -l:$(notdir $(CUBLAS_LT)),-lcublasLt) -lm

# Several GPUs need NCCL, in the compiler's path or in NCCL_HOME (include/nccl.h, lib/libnccl.so.2).
# USE_NCCL=0: without it, even where it is installed. The library is named in full because NCCL's Python
# package, which can be NCCL_HOME, has no libnccl.so.
NCCL_INCLUDE := $(if $(NCCL_HOME),-isystem '$(NCCL_HOME)/include')
ifndef PROBED
NCCL_FOUND   := $(call has_header,nccl.h,$(NCCL_INCLUDE) -I$(dir $(firstword $(NVCC)))../include)
endif
USE_NCCL     ?= $(NCCL_FOUND)
ifeq ($(USE_NCCL),1)
ifneq ($(NCCL_FOUND),1)
$(error USE_NCCL=1, but nccl.h was not found: install libnccl-dev, set NCCL_HOME to its folder, or set USE_NCCL=0)
endif
NCCL_FLAGS := -DUSE_NCCL $(NCCL_INCLUDE)
NCCL_LIBS  := $(if $(NCCL_HOME),-L'$(NCCL_HOME)/lib' $(call rpath,$(NCCL_HOME)/lib)) -l:libnccl.so.2
endif

NEED_NCCL_HOME = @[ -z '$(NCCL_HOME)' ] || [ -f '$(NCCL_HOME)/include/nccl.h' ] || { \
                 echo "error: NCCL_HOME=$(NCCL_HOME): has no include/nccl.h; set it to NCCL's folder, or unset it" >&2; exit 1; }

# nvcc takes the linker's flags in its own form, and does not know -pthread.
comma := ,
GPU_RANK_FLAGS := $(MPI_FLAGS) $(NCCL_FLAGS)
GPU_RANK_LIBS  := $(patsubst -Wl$(comma)%,-Xlinker %,$(filter-out -pthread,$(MPI_LIBS))) $(NCCL_LIBS) -lpthread

# Rewritten when the flags change, which triggers a rebuild.
build/gpu/flags: export FLAGS = $(NVCC) $(NVCCFLAGS) $(GPU_RANK_FLAGS) $(GPU_RANK_LIBS)
build/gpu/flags: FORCE
	$(NEED_NCCL_HOME)
	$(NEED_NVCC)
	@mkdir -p build/gpu
	$(WRITE_FLAGS)

train_foxcu: train_fox.cu $(CUDA_HEADERS) $(HEADERS) build/gpu/flags ## the GPU trainer; ARCHS="80 90 ..." selects the GPU architectures
	$(if $(V),,@echo 'compile $@: two to five minutes')
	$(Q)$(NVCC) $(NVCCFLAGS) $(CODE) $(GPU_CODE) $(GPU_RANK_FLAGS) $< -o $(NEW) $(GPU_LIBS) $(GPU_RANK_LIBS) && $(PUBLISH)

test_foxcu: test_fox.cu train_fox.cu train_fox.c $(wildcard dev/test/*.*h dev/test/trainer/*.*h dev/test/inference/*.cuh dev/test/gpu/*.cuh) $(CUDA_HEADERS) $(HEADERS) build/gpu/flags ## test of the GPU trainer against the CPU trainer
	$(SAY)
	$(Q)$(NVCC) $(NVCCFLAGS) $(CODE) -Xcompiler $(ARCH) $< -o $(NEW) $(GPU_LIBS) && $(PUBLISH)

all: train_fox data/text_to_shards data/ids_to_shards data/longcrawl64 ## all programs that need no GPU

# ----------------------------------------------------------------------------
##@ Main targets

check: ## list what is installed of all that the programs use, and how to install the rest
	@scripts/check.sh

# Compilers and tests run on all cores, or JOBS at a time: one more than there are cores, as some tests mostly wait.
PARALLEL = $(MAKE) --no-print-directory $(if $(findstring jobserver,$(MAKEFLAGS)),,-j$(or $(JOBS),$(shell expr $$(nproc) + 1)))

quickstart: ## install packages, build, make a corpus, train, resume, sample
	scripts/setup.sh build
	+$(PARALLEL) train_fox data/text_to_shards
	scripts/quickstart.sh

test: ## install packages, build, run the tests that need no GPU, in minutes (JOBS=)
	scripts/setup.sh test
	+$(PARALLEL) tests

test-all: ## the same with PyTorch, all builds and long campaigns: what .ci/run runs (JOBS=)
	scripts/setup.sh test-all
	+$(PARALLEL) tests-all

.PHONY: FORCE check faults fuzz torture tsan valgrind cuda-check cuda-check-tests test-gpu sanitize-gpu bench-gpu \
        all quickstart test test-all tests tests-all tests-begin gradcheck bench fixtures study-report format clean help

# ----------------------------------------------------------------------------
##@ Tests and benchmarks

# `make test` builds the tests that include the trainer in float, the others with sanitizers. `make test-all` adds the
# former in double and with sanitizers, the latter as compiled for use, and sets TEST_ALL: test_ranks.sh then also runs in
# double and with sanitizers and strikes several times as many runs, test_faults.sh takes more calls,
# test_fuzz.sh ten times as many inputs, gradcheck all elements of small tensors, and test_smoke.sh runs make torture, make
# fuzz and dev/identical.sh.
LINKED_TESTS  := test_cache test_documents test_engine test_fixtures test_layers test_maps test_model
TRAINER_TESTS := test_cpu $(LINKED_TESTS)
CHECKPOINT_TESTS := test_checkpoint test_checkpoint_init test_checkpoint_load test_hf_folder
MODEL_TESTS   := $(basename $(notdir $(wildcard dev/test/model/test_*.c)))
UNIT_TESTS    := $(filter-out $(TRAINER_TESTS),$(basename $(notdir $(wildcard dev/test/*/test_*.c))))
# by their seconds of CPU in make test-all, then in make test
LONGEST_TESTS := $(addprefix dev/test/,eval/test_harness.sh trainer/test_ranks.sh scripts/test_smoke.sh hf/test_transformers.sh \
                   eval/test_scripts.sh faults/test_faults.sh test_fuzz.sh study/test_study.sh dist/test_hosts.sh \
                   data/test_make_shards.sh scripts/test_tokenizers.sh eval/test_positions.sh resume/test_resume.sh \
                   resume/test_ended.sh scripts/test_compare.sh scripts/test_sweep.sh eval/test_requests.sh)
SHELL_TESTS   := $(LONGEST_TESTS) $(filter-out %/test_gpu.sh %/test_gpu_ranks.sh $(LONGEST_TESTS), \
                   $(wildcard dev/test/test_*.sh dev/test/*/test_*.sh))
TEST_PROGRAMS := $(TRAINER_TESTS:%=build/test/%_float) $(UNIT_TESTS:%=build/test/%_sanitized) build/test/gradcheck
ALL_PROGRAMS  := $(TEST_PROGRAMS) $(TRAINER_TESTS:%=build/test/%_double) $(TRAINER_TESTS:%=build/test/%_sanitized) \
                 $(UNIT_TESTS:%=build/test/%)
# What the shell tests start
TEST_TOOLS     = all $(FUZZ_TARGETS) build/test/faults.so build/test/train_fox_double build/test/train_fox_sanitized
TEST_HEADERS  := $(HEADERS) $(wildcard data/*.h data/*.c dev/test/*.h dev/test/*/*.h) train_fox.c | build/test
vpath %.c dev/test/llmc dev/test/model dev/test/cpu dev/test/tokens dev/test/train dev/test/trainer dev/test/data dev/test/ranks dev/test/eval dev/test/hf data

build/test:
	mkdir -p $@

# Tests that are links to one program (dev/test/trainer/named_tests.h): $1 its name, $2 the tests, $3 the end of all names
define LINKS
$(2:%=build/test/%$3): build/test/$1$3
	$$(Q)ln -f $$< $$@
$(2:%=run/build/test/%$3): build/test/$1$3
build/test/$1$3: $(foreach test,$2,$(wildcard dev/test/*/$(test).c))
endef
$(foreach end,_float _double _sanitized,$(eval $(call LINKS,trainer_tests,$(LINKED_TESTS),$(end))))
$(foreach end,- _sanitized,$(eval $(call LINKS,checkpoint_tests,$(CHECKPOINT_TESTS),$(end:-=))))
$(foreach end,- _sanitized,$(eval $(call LINKS,model_tests,$(MODEL_TESTS),$(end:-=))))

build/test/%_float: %.c $(TEST_HEADERS)
	$(SAY)
	$(Q)$(CC) $(CFLAGS) $< -o $(NEW) $(LDLIBS) && $(PUBLISH)

build/test/%_double: %.c $(TEST_HEADERS)
	$(SAY)
	$(Q)$(CC) $(CFLAGS) -DREAL_IS_DOUBLE -DTEST_FOLDER='"build/test/in_double"' $< -o $(NEW) $(LDLIBS) && $(PUBLISH)

# 1.6 million draws
build/test/test_sampler_sanitized: SANITIZE += -O2

build/test/%_sanitized: %.c $(TEST_HEADERS)
	$(SAY)
	$(Q)$(CC) $(SANITIZE) -DTEST_FOLDER='"build/test/in_sanitized"' $< -o $(NEW) $(LDLIBS) && $(PUBLISH)

build/test/gradcheck: gradcheck.c $(TEST_HEADERS)
	$(SAY)
	$(Q)$(CC) $(CFLAGS) -DREAL_IS_DOUBLE $< -o $(NEW) $(LDLIBS) && $(PUBLISH)

# The trainer itself, for the tests that start it as one rank or several
build/test/train_fox_double: train_fox.c $(HEADERS) build/flags | build/test
	$(SAY)
	$(Q)$(CC) $(CFLAGS) -O2 -DREAL_IS_DOUBLE $(TRAINER) $< -o $(NEW) $(TRAINER_LIBS) && $(PUBLISH)

build/test/train_fox_sanitized: train_fox.c $(HEADERS) build/flags | build/test
	$(SAY)
	$(Q)$(CC) $(SANITIZE) $(TRAINER) $< -o $(NEW) $(TRAINER_LIBS) && $(PUBLISH)

build/test/%: %.c $(TEST_HEADERS)
	$(SAY)
	$(Q)$(CC) $(CFLAGS) $< -o $(NEW) $(LDLIBS) && $(PUBLISH)

# The library that makes calls of a program fail
build/test/faults.so: dev/test/faults/faults.c | build/test
	$(SAY)
	$(Q)$(CC) -std=gnu11 -D_GNU_SOURCE -O2 $(WARN) $(EXTRA_CFLAGS) -shared -fPIC $< -o $(NEW) && $(PUBLISH)

faults: train_fox data/text_to_shards data/longcrawl64 build/test/faults.so ## let every call of the programs fail in turn, and check what is left (JOBS=, TRAINER=)
	dev/test/faults/faults.py

torture: train_fox ## kill runs at random moments and resume them (HOURS=0.05, SEED=1, JOBS=, TRAINER=./train_foxcu)
	dev/test/faults/torture.py $(or $(HOURS),0.05) $(or $(SEED),1)

gradcheck: build/test/gradcheck ## compare every gradient of every variant with central differences
	TEST_ALL=1 build/test/gradcheck

# Fuzz targets: with clang's libFuzzer where it is installed, elsewhere with CC and dev/fuzz/driver.c.
FUZZ_TARGETS := $(patsubst dev/fuzz/fuzz_%.c,build/fuzz/%,$(wildcard dev/fuzz/fuzz_*.c))
FUZZ_FLAGS   := $(filter-out -fopenmp,$(SANITIZE)) -Wno-unknown-pragmas -Wno-unknown-warning-option
CLANG        ?= $(firstword $(shell command -v clang clang-14))
LIBFUZZER     = $(eval LIBFUZZER := $(shell echo 'int LLVMFuzzerTestOneInput(void) { return 0; }' | \
                  $(CLANG) -fsanitize=fuzzer -xc - -o /dev/null 2>/dev/null && echo yes))$(LIBFUZZER)

build/fuzz/%: dev/fuzz/fuzz_%.c dev/fuzz/fuzz.h dev/fuzz/driver.c data/zarr.h $(HEADERS)
	@mkdir -p build/fuzz
	$(SAY)
	$(Q)$(if $(LIBFUZZER),$(CLANG) $(FUZZ_FLAGS) -fsanitize=fuzzer $<, \
	    $(CC) $(FUZZ_FLAGS) -fsanitize-coverage=trace-pc $< dev/fuzz/driver.c) \
	    -o $(NEW) $(if $(filter %/zarr,$@),-lblosc) $(LDLIBS) && $(PUBLISH)

# `make test` and `make test-all` without installing packages. Tests run the Python of setup.sh, if it made one.
PYTHON_ENV := $(patsubst %/requirements.txt,$(CURDIR)/%/bin:,$(firstword $(wildcard build/hf/requirements.txt build/python/requirements.txt)))
tests tests-all: export PATH := $(PYTHON_ENV)$(PATH)
tests: ran = $(TEST_PROGRAMS) $(SHELL_TESTS)
tests-all: ran = $(ALL_PROGRAMS) $(SHELL_TESTS)
tests-all: export TEST_ALL = 1
tests: $(TEST_PROGRAMS:%=run/%) $(SHELL_TESTS:%=run/%)
tests-all: $(ALL_PROGRAMS:%=run/%) $(SHELL_TESTS:%=run/%)
tests tests-all:
	@dev/test/run.sh --sum $(ran)

# A program is built and run in one recipe, so that results come while others are compiled.
run/build/%: | build/test build/flags $(HF_CODE) tests-begin
	+@$(MAKE) -s --no-print-directory $(PROBES) build/$*
	@dev/test/run.sh --one build/$*
run/dev/%: $(TEST_TOOLS) | tests-begin
	@dev/test/run.sh --one dev/$*
tests-begin:
	@dev/test/run.sh --begin $(words $(if $(filter tests-all,$(MAKECMDGOALS)),$(ALL_PROGRAMS),$(TEST_PROGRAMS)) $(SHELL_TESTS))

MINUTES ?= 10
fuzz: $(FUZZ_TARGETS) ## run the fuzz targets for MINUTES=10 on all cores; crashes stay in build/fuzz/crashes
	dev/fuzz/run.sh $(MINUTES)

# What has threads, under ThreadSanitizer. OpenMP has one thread: libgomp synchronizes in a way that it cannot
# see. test_world and the downloads mostly wait, for about two minutes.
TSAN_FLAGS := $(subst address$(comma)undefined,thread,$(SANITIZE))
TSAN_TESTS ?= test_dataloader test_saver test_world dev/test/data/test_longcrawl64.sh
build/tsan/%: %.c $(TEST_HEADERS)
	@mkdir -p build/tsan
	$(SAY)
	$(Q)$(CC) $(TSAN_FLAGS) $(CODE) $< -o $(NEW) $(if $(filter %/longcrawl64,$@),-lcurl -lblosc -lcrypto) $(LDLIBS) && $(PUBLISH)

TSAN_PROGRAMS := $(patsubst %,build/tsan/%,$(patsubst dev/test/data/test_%.sh,%,$(TSAN_TESTS)))
tsan: build/tsan/train_fox $(TSAN_PROGRAMS) ## run the tests of threads under ThreadSanitizer
	OMP_NUM_THREADS=1 TRAIN_FOX=build/tsan/train_fox LONGCRAWL64=build/tsan/longcrawl64 dev/test/run.sh \
	    dev/test/trainer/tiny_run.sh $(patsubst test_%,build/tsan/test_%,$(TSAN_TESTS))

# valgrind sees uninitialized memory, which gcc's sanitizers do not. It has no AVX-512: not -march=native.
build/test/train_fox_valgrind: train_fox.c $(HEADERS) | build/test
	$(SAY)
	$(Q)$(CC) $(subst $(ARCH),-march=x86-64-v2,$(CFLAGS)) -O1 -g $(CODE) $< -o $(NEW) $(LDLIBS) && $(PUBLISH)

valgrind: build/test/train_fox_valgrind ## run a tiny training run under valgrind
	TRAIN_FOX="valgrind -q --error-exitcode=9 --leak-check=full --errors-for-leak-kinds=definite \
	    build/test/train_fox_valgrind" dev/test/run.sh dev/test/trainer/tiny_run.sh

GPU_DIRS    := dev/test/gpu dev/test/attention dev/test/inference dev/test/baselines
GPU_NAMES   := $(basename $(notdir $(wildcard $(GPU_DIRS:=/test_*.cu) dev/cuda/bench_*.cu)))
GPU_TESTS   := $(addprefix build/gpu/,$(filter-out $(WITHOUT_CUDNN),$(filter test_%,$(GPU_NAMES))))
GPU_BENCHES := $(addprefix build/gpu/,$(filter-out $(WITHOUT_CUDNN),$(filter bench_%,$(GPU_NAMES))))

vpath test_%.cu $(GPU_DIRS)
build/gpu/test_%: test_%.cu $(wildcard $(GPU_DIRS:=/*.cuh)) $(CUDA_HEADERS) $(HEADERS) build/gpu/flags
	$(SAY)
	$(Q)$(NVCC) $(NVCCFLAGS) -Xcompiler $(ARCH) $< -o $(NEW) $(GPU_LIBS) && $(PUBLISH)

# The GPU trainer whose ranks may share one GPU, for dev/test/trainer/test_gpu_ranks.sh where there is one alone
build/gpu/train_fox_one_gpu: train_fox.cu dev/test/one_gpu/nccl.h $(CUDA_HEADERS) $(HEADERS) build/gpu/flags
	$(SAY)
	$(Q)$(NVCC) $(NVCCFLAGS) $(CODE) $(GPU_CODE) $(MPI_FLAGS) -DUSE_NCCL -DRANKS_SHARE_GPU -Idev/test/one_gpu $< -o $(NEW) \
	    $(GPU_LIBS) $(patsubst -Wl$(comma)%,-Xlinker %,$(filter-out -pthread,$(MPI_LIBS))) -lpthread && $(PUBLISH)

build/gpu/test_decoding build/gpu/test_sequence: train_fox.cu train_fox.c $(wildcard dev/test/trainer/*.*h)

build/gpu/%: dev/cuda/%.cu dev/cuda/bench.cuh $(CUDA_HEADERS) $(HEADERS) build/gpu/flags
	$(SAY)
	$(Q)$(NVCC) $(NVCCFLAGS) $< -o $(NEW) $(GPU_LIBS) && $(PUBLISH)

test-gpu: train_fox train_foxcu test_foxcu $(GPU_TESTS) ## run all tests that need a GPU
	JOBS=1 dev/test/run.sh $(GPU_TESTS) ./test_foxcu dev/test/trainer/test_gpu.sh dev/test/trainer/test_gpu_ranks.sh

# racecheck cannot track one lane that arrives at an mbarrier for its warp: in this build every lane does.
sanitize-gpu: override EXTRA_NVCCFLAGS += -DSM90_EVERY_LANE_ARRIVES
sanitize-gpu: $(GPU_TESTS) test_foxcu ## run the GPU tests under compute-sanitizer, on small shapes
	dev/test/sanitize_gpu.sh $(GPU_TESTS)

bench-gpu: $(GPU_BENCHES) ## benchmark the kernels
	for b in $(GPU_BENCHES); do $$b || exit 1; done

# Each header alone, and the tests and benchmarks, as far as PTX that is not optimized (-G), to see that they compile
GPU_SOURCES = test_fox.cu $(foreach n,$(notdir $(GPU_TESTS) $(GPU_BENCHES)),$(wildcard $(GPU_DIRS:=/$n.cu) dev/cuda/$n.cu))
cuda-check-tests: $(HF_CODE)
	$(NEED_NVCC)
	printf '%s\n' $(CUDA_HEADERS) | xargs -P 2 -I{} $(NVCC) -std=c++17 -D_GNU_SOURCE -ptx -G -w -arch=compute_80 -x cu {} -o /dev/null
	printf '%s\n' $(GPU_SOURCES) | xargs -P 2 -I{} $(NVCC) -std=c++17 -D_GNU_SOURCE -ptx -G -arch=compute_80 \
	    -Xcompiler -Wall,-Wextra,-Werror,-fopenmp -Werror all-warnings {} -o /dev/null

# For others: make cuda-check ARCHS="80 86 89 90 100 120"; each architecture takes a few minutes of one core.
cuda-check: ARCHS = 80 90
cuda-check: EXTRA_NVCCFLAGS = -Werror all-warnings -Xcompiler -Werror
cuda-check: cuda-check-tests $(HF_CODE) ## compile the CUDA programs, without warnings and with few spills (ARCHS="80 90"); needs no GPU
	$(NEED_NVCC)
	mkdir -p build/gpu
	$(NVCC) $(NVCCFLAGS) $(CODE) $(GPU_CODE) $(GPU_RANK_FLAGS) -Xptxas -v train_fox.cu -o build/gpu/train_foxcu \
	    $(GPU_LIBS) $(GPU_RANK_LIBS) 2>build/gpu/ptxas.txt || { cat build/gpu/ptxas.txt; exit 1; }
	dev/test/check_ptxas.sh build/gpu/ptxas.txt

bench: train_fox ## time a training step of fox-pro-nano against PyTorch eager (PYTHON=a python with torch)
	dev/reference/bench_cpu.sh

fixtures: ## regenerate dev/test/fixtures/model (PYTHON=a python with torch, numpy, safetensors)
	$(PYTHON) dev/reference/make_fixtures.py

PYTHON ?= python3

# ----------------------------------------------------------------------------
##@ Maintenance

study-report: ## write the tables and pictures of dev/STUDY.md from dev/study/results.jsonl
	python3 dev/study/report.py

format: ## format all C and CUDA sources
	clang-format -i $$(git ls-files '*.c' '*.h' '*.cu' '*.cuh')

clean: ## remove build outputs; keep data, checkpoints and logs
	rm -rf build train_fox train_foxcu test_foxcu data/text_to_shards data/ids_to_shards data/longcrawl64

help: ## print this list
	@awk 'BEGIN { FS = ":.*## " } /^##@/ { printf "\n%s\n", substr($$0, 5) } \
	     /^[a-zA-Z_\/0-9-]+:.*## / { printf "  %-22s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@printf '\nVariables: CC, ARCH (-march=native), EXTRA_CFLAGS; NVCC or CUDA_HOME, ARCHS ("80 90 ..."), USE_CUDNN=1; PYTHON; V=1 (whole commands)\n'
	@printf '           USE_MPI=0|1 (now $(USE_MPI)), USE_NCCL=0|1 (now $(USE_NCCL)), NCCL_HOME (a folder with include/nccl.h): several ranks\n'
