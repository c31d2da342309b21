# fared. `make demo` shows the main job; `make test` is everything that must hold. Both do their own set-up.

GO         ?= go
VERSION    ?= $(shell cat VERSION)$(addprefix +,$(shell git describe --always --dirty --abbrev=12 --exclude '*' 2>/dev/null))
LDFLAGS    := -X github.com/fared/fared/internal/version.version=$(VERSION)
STATICCHECK := honnef.co/go/tools/cmd/staticcheck@v0.8.0
ERRORLINT   := github.com/polyfloyd/go-errorlint@v1.8.0
UNPARAM     := mvdan.cc/unparam@v0.0.0-20260823230713-2fa3d841b0c8
REVIVE      := github.com/mgechev/revive@v1.16.0
MISSPELL    := github.com/golangci/misspell/cmd/misspell@v0.6.0
BUF         := github.com/bufbuild/buf/cmd
BUFVERSION  := v1.50.0
FUZZTIME   ?= 20s
BENCHTIME  ?= 1s

# Without gRPC's traces for HTTP (golang.org/x/net/trace) the linker removes methods that only templates could call.
TAGS       := grpcnotrace

# One set of flags for the binary, the tests and the linters, so that each package is compiled once for all of them, and once more for the race detector.
export CGO_ENABLED := 0
export GOFLAGS := $(strip $(GOFLAGS) -trimpath -tags=$(TAGS))

MUTANTS    ?= 40
SEED       ?= 1
THRESHOLD  ?= 90
ALSO       ?=
MUTATED    ?= ./fare ./wecmp ./daemon ./daemon/internal/core ./daemon/internal/guard ./daemon/internal/speaker ./daemon/internal/bfd ./dataplane/internal/contract ./dataplane/linux

CHAOS_MINUTES ?= 10
CHAOS_SEED ?=
CHAOS_FABRIC ?=
SUITE ?= trixie
SOAK_CHANGES ?= 6000
SOAK_MINUTES ?=
PYTORCH_STEPS ?= 1000

PEERS_ROWS ?=
PEERS_CONTESTANTS ?=
PEERS_SIZES ?=
PEERS_REPETITIONS ?=
PEERS_BUSY ?=
PEERS_PLANES ?=
PEERS_SUB_PORTS ?=
PEERS_FLAP ?=

PARTS ?= all

.PHONY: kustomize packages release build demo test test-slow test-all unit set-up mutate chaos soak vm bench bench-peers bench-peers-busy lib install-lib lint lint-go lint-foreign generate baseline check-generated fuzz deps images labs containerlab systemd clean

build:
	$(GO) build -ldflags '$(LDFLAGS)' -o bin/ ./cmd/fared ./cmd/fared-lab ./cmd/fared-kube

# libfared, static and shared, in bin/lib; the C library that reads the slot table (docs/slots.md). libfared-verbs.so too, if libibverbs-dev is installed.
lib:
	$(MAKE) -C lib OUT=$(CURDIR)/bin/lib
	$(MAKE) -C lib/softdev OUT=$(CURDIR)/bin/lib
	$(MAKE) -C lib/nccl OUT=$(CURDIR)/bin/lib

# Installs libfared and libfared-verbs.so: DESTDIR, PREFIX (/usr/local), LIBDIR, INCLUDEDIR, MANDIR.
install-lib:
	$(MAKE) -C lib OUT=$(CURDIR)/bin/lib install
	$(MAKE) -C lib/softdev OUT=$(CURDIR)/bin/lib install
	$(MAKE) -C lib/nccl OUT=$(CURDIR)/bin/lib install

# The draft's failures on a fabric of real BGP sessions inside one process: no root, no containers.
demo: build
	./bin/fared lab --scenario all

# The gate: set-up, generated files, lint, then every quick test and the longer ones that the gate needs (docs/testing.md). FARED_REQUIRE_ALL=1 turns
# every skip into a failure.
test:
	@$(MAKE) --jobs=4 --output-sync=target lint-go set-up
	@$(MAKE) unit

# The installed packages, and what is made and judged by them.
set-up: deps
	@$(MAKE) check-generated lint-foreign labs

# The tests of the gate alone.
unit: build
	FARED_BINARY=$(CURDIR)/bin/fared $(GO) run ./internal/testkit/runtests

# The tests that the gate leaves out, in parts, each closing with its count. PARTS="interop packets" chooses.
test-slow: build
	./scripts/deps.sh $(PARTS)
	@$(MAKE) labs
	FARED_REQUIRE_ALL=1 FARED_BINARY=$(CURDIR)/bin/fared $(GO) run ./internal/testkit/runtests -parts '$(PARTS)'

test-all:
	@$(MAKE) test
	@$(MAKE) test-slow PARTS=all

deps:
	./scripts/deps.sh

# The images of the labs in containers, made here: no registry is needed.
images: build
	./scripts/images.sh

# The kustomize base, from the chart.
kustomize: build
	FARED_BINARY=$(CURDIR)/bin/fared $(GO) test -C interop/kube -count=1 -run 'TestBase$$' . -update

# What the tests of the labs in containers need, where Docker runs.
labs:
	@if docker info >/dev/null 2>&1; then $(MAKE) images containerlab; else echo "labs: no Docker daemon answers, so nothing is tested in containers"; fi

# The systemd units under the systemd and the routers of another Debian suite.
systemd: deps
	./scripts/images.sh $(SUITE)
	FARED_REQUIRE_ALL=1 FARED_PARTS=systemd FARED_SYSTEMD_IMAGE=fared-debian-$(SUITE):local $(GO) test -count=1 -v ./systemd

# A containerlab that runs on this machine; the last line is its path.
containerlab:
	./scripts/containerlab.sh

# deb, rpm, OCI image, SBOM and SHA256SUMS in out/packages (docs/operations/install.md). VERSION=0.1.1~rc1, otherwise that of the file VERSION, and ARCHS="amd64 arm64" choose.
packages:
	VERSION='$(if $(filter command line environment,$(origin VERSION)),$(VERSION))' GO='$(GO)' ./scripts/packages.sh

# The packages of the tag v0.1.0 that is checked out, from a clean tree, built twice in separate clones and equal.
release:
	./scripts/release.sh

lint: lint-go lint-foreign

# What needs Go alone. Memory for time: the linters take a sixth less.
lint-go: export GOGC := 400
lint-go:
	@out=$$(gofmt -l $$(git ls-files '*.go')); if [ -n "$$out" ]; then echo "not formatted (gofmt -w):"; echo "$$out"; exit 1; fi
	$(GO) vet ./...
	$(GO) -C internal/tools/ociimage vet .
	$(GO) run $(STATICCHECK) ./...
	$(GO) run $(ERRORLINT) -test=false ./...
	$(GO) run $(UNPARAM) ./...
	$(GO) run $(REVIVE) -config .revive.toml -set_exit_status ./...
	$(GO) run ./internal/tools/prose
	@$(GO) run $(MISSPELL) -locale US -i weigths,cancelled,ect -error $$(git ls-files '*.go' '*.md' '*.proto' '*.sh' '*.c' '*.h' '*.py' | grep -v 'pb\.go$$')

# The API, C, shell and Python.
lint-foreign:
	./scripts/lint-api.sh $(BUF) $(BUFVERSION)
	./scripts/lint-foreign.sh

generate:
	./scripts/generate.sh

# The protobuf API that make lint protects from incompatible changes becomes that of the sources: at a release, or for a deliberate break.
baseline:
	cd api && $(GO) run $(BUF)/buf@$(BUFVERSION) build -o baseline.binpb.gz

# Generated files are committed; they must be what the generators make of their sources.
check-generated:
	./scripts/generate.sh --check

bench:
	$(GO) test -run '^$$' -bench . -benchmem -benchtime $(BENCHTIME) ./...

# The contest with FRR and BIRD (docs/benchmarks.md), alone on the machine. PEERS_ROWS=update1,degrade, PEERS_CONTESTANTS=bird,fared-linux, PEERS_SIZES=1,10000 and
# PEERS_REPETITIONS=5 choose a part; PEERS_BUSY=2 measures each row next to that many busy processes too, PEERS_PLANES=8 PEERS_SUB_PORTS=2 have as many leaves and sessions with each, PEERS_FLAP=30s makes flaps
# last as long. Writes out/bench-peers.json and .svg. Needs root, FRR, BIRD.
bench-peers:
	FARED_REQUIRE_ALL=1 FARED_PARTS=chaos FARED_PEERS=1 FARED_PEERS_OUT=$(CURDIR)/out FARED_PEERS_ROWS='$(PEERS_ROWS)' FARED_PEERS_CONTESTANTS='$(PEERS_CONTESTANTS)' FARED_PEERS_SIZES='$(PEERS_SIZES)' \
	  FARED_PEERS_REPETITIONS='$(PEERS_REPETITIONS)' FARED_PEERS_BUSY='$(PEERS_BUSY)' \
	  FARED_PEERS_PLANES='$(PEERS_PLANES)' FARED_PEERS_SUB_PORTS='$(PEERS_SUB_PORTS)' FARED_PEERS_FLAP='$(PEERS_FLAP)' $(GO) test -count=1 -v -timeout 0 -run 'TestContest$$' ./interop/peers

# The contest with each row twice: idle, and next to a busy process on each core, in columns side by side.
bench-peers-busy:
	$(MAKE) bench-peers PEERS_BUSY=$(shell nproc)

# Every fuzzer for FUZZTIME each.
fuzz:
	./scripts/fuzz.sh $(FUZZTIME)

# Tests measured by faults: MUTANTS faults in each of MUTATED, and the share that the tests of the package and of ALSO notice (docs/testing.md).
mutate:
	$(GO) run ./internal/tools/mutate -n $(MUTANTS) -seed $(SEED) -threshold $(THRESHOLD) -also "$(ALSO)" $(MUTATED)

# Random failures for CHAOS_MINUTES under a judge that shares nothing with fared; CHAOS_SEED chooses them, and the fabric unless CHAOS_FABRIC names one (docs/testing.md). Needs root and FRR.
chaos:
	FARED_REQUIRE_ALL=1 FARED_PARTS=chaos FARED_CHAOS_MINUTES=$(CHAOS_MINUTES) FARED_CHAOS_SEED=$(CHAOS_SEED) FARED_CHAOS_FABRIC=$(CHAOS_FABRIC) $(GO) test -count=1 -v -timeout 0 -run 'TestChaos$$' ./interop/chaos

# 1,000 failures of planes below NCCL's plugin, over TCP and over verbs; a training of PyTorch in which leaves fail every few seconds (out/pytorch.svg); 10 GB over fared_soft0 while a leaf
# fails each second; then SOAK_CHANGES changes of cables and leaves, or what fits in SOAK_MINUTES; what the processes hold must not grow.
soak:
	FARED_REQUIRE_ALL=1 FARED_PARTS=c FARED_NCCL_FLAPS=1000 $(GO) test -count=1 -v -timeout 0 -run '^Test(Verbs)?PlanesFail$$' ./lib/nccl
	FARED_REQUIRE_ALL=1 FARED_PARTS=c FARED_PYTORCH_STEPS=$(PYTORCH_STEPS) $(GO) test -count=1 -v -timeout 0 -run 'TestPyTorch$$' ./examples/pytorch
	FARED_REQUIRE_ALL=1 FARED_PARTS=c FARED_SOFTDEV_BYTES=10000000000 $(GO) test -count=1 -v -timeout 0 -run 'TestLeavesDie$$' ./lib/softdev
	FARED_REQUIRE_ALL=1 FARED_PARTS=chaos FARED_SOAK_CHANGES=$(SOAK_CHANGES) FARED_SOAK_MINUTES=$(SOAK_MINUTES) $(GO) test -count=1 -v -timeout 0 -run 'TestSoak$$' ./interop/chaos

# Virtual machines with Debian's kernels: a first day with the shipped units, RDMA programs over rdma_rxe, two machines that share memory, the carriers'
# programs of driver bpf (docs/testing.md). Needs root, Docker, apt.
vm:
	@$(MAKE) test-slow PARTS=vm

clean:
	rm -rf bin out
