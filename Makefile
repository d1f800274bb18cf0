# Thin wrapper: every target is one or two commands of cmake, ctest or a script.
BUILD := build/release
JOBS  := $(shell nproc 2>/dev/null || echo 2)

.PHONY: all build program setup demo collide test test-interpreted cuda cuda-newer check bench sanitize tsan attack fuzz format format-check \
        tidy compile-commands wheel install package clean help

all: build

setup:             ## install the packages mneme is built with
	@sh tools/setup.sh

# A first build has only the vector kernels that this machine chooses, no tests and nothing for Python, which
# halves the wait; `make build`, and so `make test` and `make install`, adds them, and a folder that has them
# keeps them.
FIRST := -DMN_NATIVE=ON -DMN_TESTS=OFF -DMN_PYTHON=OFF
WHOLE := -DMN_NATIVE=OFF -DMN_TESTS=ON -DMN_PYTHON=ON
program: setup     ## the program alone, build/release/mneme: for this machine's CPU, and for a GPU that it has
	@cmake --preset release $$([ -f $(BUILD)/CMakeCache.txt ] || echo '$(FIRST)') >/dev/null
	@cmake --build $(BUILD) -j $(JOBS) --target mneme_cli -- --no-print-directory

build: setup       ## program, libraries and tests in build/release, for all CPUs of this kind
	@cmake --preset release $(WHOLE) >/dev/null
	@cmake --build $(BUILD) -j $(JOBS) -- --no-print-directory

cuda: setup        ## the program with CUDA kernels for all machines, in build/cuda (some minutes; needs nvcc, no GPU)
	@cmake --preset cuda >/dev/null
	@cmake --build build/cuda -j $(JOBS) --target mneme_cli -- --no-print-directory

cuda-newer: setup  ## machine code of all kernels for sm_100 and sm_120, in build/cuda-newer (nvcc 12.8): whether it compiles
	@cmake --preset cuda-newer >/dev/null
	@cmake --build build/cuda-newer -j $(JOBS) --target mneme_cuda -- --no-print-directory

# Three minutes with the building: the models learn for what that left, 70 to 110 seconds.
BEGAN := $(shell date +%s)
demo: program      ## two small models learn stories and are asked: table, figures in build/demo
	@left=$$(($(BEGAN) + 150 - $$(date +%s))); [ $$left -le 110 ] || left=110; [ $$left -ge 70 ] || left=70; \
	    $(BUILD)/mneme demo --out build/demo --seconds $$left

collide: program   ## the collision experiment, as a table and two figures in build/collide
	@$(BUILD)/mneme collide --figures build/collide

# One more than there are cores: some wait, for a mirror, a clock or a disk.
test: build        ## all tests
	@ctest --preset release -j $$(($(JOBS) + 1))

test-interpreted: setup  ## CUDA kernels on the CPU, by an interpreter of their PTX (a build of some minutes; needs nvcc, no GPU)
	@command -v nvcc >/dev/null || { echo "nvcc is not here: CUDA kernels are not run on the CPU"; exit 0; }; \
	    cmake --preset cuda-interpreted >/dev/null && \
	    cmake --build build/cuda-interpreted -j $(JOBS) --target tests_interpreted -- --no-print-directory && \
	    sh tests/interpreted.sh build/cuda-interpreted

check: setup       ## golden vectors on every target of this machine
	@cmake --preset release -DMN_NATIVE=OFF >/dev/null
	@cmake --build $(BUILD) -j $(JOBS) --target mneme_cli -- --no-print-directory
	@$(BUILD)/mneme check --quiet tests/golden/*.safetensors

bench: program     ## operators against ceilings measured in the same run
	@$(BUILD)/mneme bench ops

sanitize: setup    ## tests under address and undefined-behaviour sanitizers
	@cmake --preset debug >/dev/null && cmake --build build/debug -j $(JOBS) --target tests_sanitize -- --no-print-directory
	@ctest --preset debug -j $(JOBS) -L sanitize

tsan: setup        ## tests under the thread sanitizer
	@cmake --preset tsan >/dev/null && cmake --build build/tsan -j $(JOBS) --target tests_threads -- --no-print-directory
	@ctest --preset tsan -j $(JOBS) -L threads

attack: setup      ## 20,000 mutated inputs, every option and call wrong, 100 kills: release, and under sanitizers
	@sh tools/attack.sh

fuzz: setup        ## each parser for FUZZ_SECONDS (30)
	@sh tools/fuzz.sh

format:            ## clang-format over the files that changed, or over FILES
	@sh tools/format.sh $(FILES)

format-check:      ## columns, tabs, braces, lengths of functions and files
	@sh tests/format.sh .

tidy: setup        ## clang-tidy over the C files that changed since BASE (the commit before)
	@cmake --preset release >/dev/null
	@sh tools/tidy.sh $(BUILD) $(BASE)

compile-commands:  ## compile_commands.json for editors, C and CUDA
	@cmake --preset cuda >/dev/null
	@sh tools/compile_commands.sh build/cuda >compile_commands.json

wheel:             ## wheels of the Python package in dist: CPU, and CUDA where nvcc is
	@sh python/tools/wheel.sh all dist

install: build     ## PREFIX=/usr/local by default
	@cmake --install $(BUILD) --prefix $(or $(PREFIX),/usr/local)

package:           ## a .deb and a tarball of the program, the library and its header, in build/packages
	@sh tools/setup.sh
	@cmake -S . -B build/package -DCMAKE_BUILD_TYPE=Release -DMN_TESTS=OFF -DMN_OPENBLAS=OFF -DMN_CUDA=$(or $(CUDA),OFF) >/dev/null
	@cmake --build build/package -j $(JOBS) -- --no-print-directory
	@sh tools/package.sh build/package build/packages

clean:
	@rm -rf build

help:              ## this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:[^#]*## /\t/' | expand -t 18
