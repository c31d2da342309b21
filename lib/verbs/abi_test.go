package verbs

import (
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/fared/fared/internal/testkit/cbuild"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// built makes the library as make lib does.
func built(t testing.TB) string {
	t.Helper()
	netnstest.Tools(t, "/usr/include/infiniband/verbs.h")
	return filepath.Join(cbuild.Make(t, "."), "libfared-verbs.so")
}

// TestABI compares the exported symbols with the golden file, and the needed libraries with libc and libibverbs.
func TestABI(t *testing.T) {
	library := built(t)
	var got strings.Builder
	for line := range strings.Lines(run(t, "nm", "-D", "--defined-only", library)) {
		f := strings.Fields(line)
		got.WriteString(f[1] + " " + f[2] + "\n")
	}
	const golden = "testdata/abi.txt"
	if *update {
		if err := os.WriteFile(golden, []byte(got.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil || got.String() != string(want) {
		t.Errorf("exported symbols, %v:\n%s\nwant:\n%s", err, got.String(), want)
	}
	var needed []string
	for line := range strings.Lines(run(t, "readelf", "-d", library)) {
		if _, name, found := strings.Cut(line, "Shared library: ["); found {
			needed = append(needed, strings.TrimSuffix(strings.TrimSpace(name), "]"))
		}
	}
	if want := []string{"libibverbs.so.1", "libc.so.6", "ld-linux-x86-64.so.2"}; !slices.Equal(needed, want) {
		t.Errorf("needed libraries: %q, want %q", needed, want)
	}
}

// TestGlibc checks that the libraries of the packages need no later glibc than packaging/libfared.yaml and
// docs/kubernetes.md name: containers of other images load them.
func TestGlibc(t *testing.T) {
	const newest = 34 // of version 2
	libraries := []string{built(t), filepath.Join(filepath.Dir(built(t)), "libfared.so")}
	libraries = append(libraries, filepath.Join(cbuild.Make(t, "softdev"), "libfared-softdev.so"), filepath.Join(cbuild.Make(t, "nccl"), "libnccl-net-fared.so"))
	for _, library := range libraries {
		most := 0
		for line := range strings.Lines(run(t, "readelf", "--wide", "--version-info", library)) {
			if _, version, found := strings.Cut(line, "Name: GLIBC_2."); found {
				minor, err := strconv.Atoi(strings.FieldsFunc(version, func(r rune) bool { return r < '0' || r > '9' })[0])
				if err != nil {
					t.Fatal(line, err)
				}
				most = max(most, minor)
			}
		}
		if most == 0 || most > newest {
			t.Errorf("%s needs glibc 2.%d, want at most 2.%d", library, most, newest)
		}
	}
}

// The symbols that NCCL 2.30 looks up by dlvsym, and those that MSCCL++ looks up by dlsym.
const (
	ncclSymbols = `ibv_get_device_list ibv_free_device_list ibv_get_device_name ibv_open_device ibv_close_device ibv_get_async_event ibv_ack_async_event ibv_query_device
		ibv_query_port ibv_query_gid ibv_query_qp ibv_alloc_pd ibv_dealloc_pd ibv_reg_mr ibv_dereg_mr ibv_create_cq ibv_destroy_cq ibv_create_qp ibv_modify_qp
		ibv_destroy_qp ibv_fork_init ibv_event_type_str`
	mscclppSymbols = `ibv_get_device_list ibv_free_device_list ibv_alloc_pd ibv_dealloc_pd ibv_open_device ibv_close_device ibv_query_device ibv_create_cq ibv_create_qp
		ibv_destroy_cq ibv_reg_mr ibv_dereg_mr ibv_query_gid ibv_modify_qp ibv_destroy_qp ibv_query_port ibv_reg_dmabuf_mr ibv_wc_status_str`
)

// TestLoaders opens the library by name, a thousand times, and looks up every symbol of NCCL and MSCCL++ with its
// version behind Debian's libibverbs: the exported ones are the interposer's, all others those of libibverbs.
func TestLoaders(t *testing.T) {
	p := compile(t, "plain")
	library := built(t)
	arguments := []string{library}
	for _, name := range strings.Fields(ncclSymbols) {
		arguments = append(arguments, name, "IBVERBS_1.1")
	}
	arguments = append(arguments, "ibv_reg_mr_iova2", "IBVERBS_1.8", "ibv_reg_dmabuf_mr", "IBVERBS_1.12", "ibv_query_ece", "IBVERBS_1.10", "ibv_modify_qp", "IBVERBS_1.0",
		"ibv_copy_qp_attr_from_kern", "IBVERBS_1.0")
	for _, name := range strings.Fields(mscclppSymbols) {
		arguments = append(arguments, name, "-")
	}
	ours := strings.Fields("ibv_close_device ibv_copy_qp_attr_from_kern ibv_destroy_qp ibv_modify_qp")
	n := 0
	for line := range strings.Lines(run(t, p.path("loader"), arguments...)) {
		f := strings.Fields(line)
		n++
		own := slices.Contains(ours, f[0]) && (f[0] == "ibv_copy_qp_attr_from_kern" || f[1] != "IBVERBS_1.0")
		if own != (f[2] == "libfared-verbs.so") || !own && !strings.HasPrefix(f[2], "libibverbs.so.1") {
			t.Errorf("%s of version %s is found in %s", f[0], f[1], f[2])
		}
	}
	if n != (len(arguments)-1)/2 || n < 40 {
		t.Errorf("%d of %d symbols looked up", n, (len(arguments)-1)/2)
	}
	// A call through the handle of a library opened by name reaches libibverbs.
	t.Setenv("LD_LIBRARY_PATH", p.dir)
	t.Setenv("LOADER_CALL", "1")
	run(t, p.path("loader"), p.path("libfared-verbs.so"))
}
