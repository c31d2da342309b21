# fared. `make demo` shows the main job; `make test` is everything that must hold. Both do their own set-up.

GO         ?= go
VERSION    ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo devel)
LDFLAGS    := -X github.com/fared/fared/internal/version.version=$(VERSION)
STATICCHECK := honnef.co/go/tools/cmd/staticcheck@v0.8.0
FUZZTIME   ?= 20s
BENCHTIME  ?= 1s

.PHONY: build demo test unit bench lint generate check-generated fuzz deps images labs containerlab clean

build:
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags '$(LDFLAGS)' -o bin/fared ./cmd/fared

# The draft's failures on a fabric of real BGP sessions inside one process: no root, no containers.
demo: build
	./bin/fared lab --scenario all

# Everything: set-up, generated files, lint, unit and property tests under the race detector, interoperability with
# FRR, BIRD and GoBGP in network namespaces. FARED_REQUIRE_ALL=1 turns every skip into a failure.
test: deps check-generated lint labs unit

unit:
	./scripts/test.sh

deps:
	./scripts/deps.sh

# The images of the labs in containers, made here: no registry is needed.
images: build
	./scripts/images.sh

# What the tests of the labs in containers need, where Docker runs.
labs:
	@if docker info >/dev/null 2>&1; then $(MAKE) images containerlab; else echo "labs: no Docker daemon answers, so nothing is tested in containers"; fi

# A containerlab that runs on this machine; the last line is its path.
containerlab:
	./scripts/containerlab.sh

lint:
	@out=$$(gofmt -l $$(git ls-files '*.go')); if [ -n "$$out" ]; then echo "not formatted (gofmt -w):"; echo "$$out"; exit 1; fi
	$(GO) vet ./...
	$(GO) run $(STATICCHECK) ./...

generate:
	./scripts/generate.sh

# Generated files are committed; they must be what the generators make of their sources.
check-generated:
	./scripts/generate.sh --check

bench:
	$(GO) test -run '^$$' -bench . -benchmem -benchtime $(BENCHTIME) ./...

# Every fuzzer for FUZZTIME each.
fuzz:
	./scripts/fuzz.sh $(FUZZTIME)

clean:
	rm -rf bin out
