// Package deptest checks the rules of the architecture: the imports that each package must not have, and the reasons.
package deptest

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/fared/fared"

// rules forbid packages whose path begins with From to import packages whose path begins with To, except Except.
var rules = []struct{ From, To, Except, Why string }{
	{"/fare", "", "", "the path-bandwidth core is pure: standard library only"},
	{"/wecmp", "", "", "the weight engine is pure: standard library only, and knows no BGP"},
	{"/", "github.com/osrg/gobgp", "/daemon/internal/speaker", "GoBGP is behind the speaker; what it can do to the process stays in one place"},
	{"/", "github.com/vishvananda/netlink", "/daemon/internal/link /daemon/discover /dataplane/linux /dataplane/bpf /internal/rtnl /internal/rdmadev /internal/firewall /internal/hostcheck /dataplane/internal/neighbor /dataplane/internal/returning /transport/internal/frames /internal/testkit/netnstest /cmd/fared-lab/internal/netsetup /lab", "the kernel is reached in few places"},
	{"/", "github.com/cilium/ebpf", "/dataplane/bpf /transport/tcpqp /transport/tcpslots /internal/testkit/bpftest /internal/testkit/packettap /interop/peers", "BPF is the steering's, that of options and source ports of TCP, and that of tests which count packets or stamp messages"},
	{"/internal/rtnl", module, "", "messages do not depend on their senders"},
	{"/daemon/internal/bfd", module, "", "BFD knows its neighbor, and no BGP"},
	{"/daemon/config", module + "/daemon/internal", "", "programs other than the daemon read the configuration"},
	{"/api", module + "/daemon", "", "the contract does not depend on its implementations"},
	{"/dataplane", module + "/daemon", "", "a data plane is another process"},
	{"/daemon", module + "/dataplane", "", "a data plane is another process"},
	{"/transport/rdma", module + "/transport/roce", "/transport/rdma/rdmatest", "the verbs know transports by their contract only"},
	{"/transport/rdma", module + "/transport/superp", "/transport/rdma/rdmatest", "the verbs know transports by their contract only"},
	{"/transport/rdma", module + "/transport/tcpqp", "/transport/rdma/rdmatest", "the verbs know transports by their contract only"},
	{"/transport/rdma", module + "/transport/nupa", "/transport/rdma/rdmatest", "the verbs know transports by their contract only"},
	{"/transport/roce", module + "/api", "", "a protocol core implements its protocol alone"},
	{"/interop/transports/superppeer", module, "", "an independent peer shares no code with what it judges"},
	{"/interop/transports/rocepeer", module, "", "an independent peer shares no code with what it judges"},
	{"/interop/transports/tcpbth", module, "", "an independent decoder shares no code with what it judges"},
	{"/transport/internal/wire", module, "", "an interface has no dependency"},
	{"/client", module + "/daemon", "", "a client needs a running fared, and none of its code"},
	{"/client", module + "/dataplane", "", "a client needs a running fared, and none of its code"},
	{"/kube", module + "/daemon", "", "what Kubernetes shows needs a running fared, and none of its code"},
	{"/kube", module + "/dataplane", "", "what Kubernetes shows needs a running fared, and none of its code"},
	{"/internal/slotlayout", module, "/internal/slotlayout/gen", "a layout has no dependency"},
	{"/examples", module + "/daemon", "", "an example does what a program outside the repository can do, with the API alone"},
	{"/examples", module + "/dataplane", "", "an example does what a program outside the repository can do, with the API alone"},
	{"/examples", module + "/internal", "", "an example does what a program outside the repository can do, with the API alone"},
	{"/topo", module + "/api", "", "the model of a fabric describes and computes: it runs and asks nothing"},
	{"/topo", module + "/dataplane", "", "the model of a fabric describes and computes: it runs and asks nothing"},
	{"/topo", module + "/lab", "", "a lab is made from the model of a fabric"},
	{"/lab/backend", module + "/lab", "", "a backend receives states and reports them: it knows no judge, no probe and no scenario"},
	{"/lab/probe", module + "/lab/judge", "", "a probe reports numbers and knows no expectation"},
}

// limits allow packages whose path begins with From to import, outside the standard library, only packages whose path,
// without that of this module, begins with one of Only, and of the standard library not the packages Not.
var limits = []struct{ From, Only, Not, Why string }{
	{"/daemon/internal/core", "/fare /wecmp /daemon/config", "context log/slog net os syscall time", "the core decides: it has no goroutine, socket, file or clock"},
	{"/daemon/internal/guard", "/fare", "context log/slog net os syscall", "the guard judges bytes: it has no socket, file or clock, and needs of the module the type of a route's attributes alone"},
	{"/daemon/internal/proof", "/internal/prefixmap", "context log/slog net os syscall", "proofs are judged in virtual time: no goroutine, socket, file or clock"},
	{"/kube/nodestate", "/api", "context log/slog net os syscall time", "what Kubernetes shows is computed from answers alone"},
	{"/kube/pacer", "", "context log/slog net os syscall", "writes are paced in virtual time: no goroutine, socket, file or clock"},
	{"/topo/locate", "/topo /fare", "context log/slog net os syscall", "faults are located from views alone: no goroutine, socket, file or clock"},
	{"/fleet/etcd", "/internal/waits golang.org/x/sys/unix", "", "etcd is reached by its JSON API: no client library"},
	{"/fleet/configmap", "/kube/apiserver", "", "the API server is reached by plain REST: no client library"},
	{"/fleet/drain", "/topo /fare", "log/slog net os syscall", "drains are judged and kept by an engine: no socket, no file"},
	{"/daemon/page", "/api golang.org/x/net/netutil", "", "the page shows what the API returns, and cannot reach the daemon's state"},
	{"/lab/judge", "/topo /fare /wecmp /api", "", "the judge of a lab computes from cables alone: it runs and asks nothing"},
}

// order lists the top folders so that every import leads to an earlier one: no arrow runs up. internal/testkit/testbed
// is for tests alone, above all of them.
var order = strings.Fields("internal fare wecmp api client kube lib transport dataplane daemon pods topo fleet traffic lab examples containerlab charts interop systemd monitoring cmd")

// goList returns the output of go list in the root folder. Patterns are folders, because for a pattern of import paths
// go also reads the requirements of modules that nothing imports, which a test in a network namespace cannot fetch.
func goList(t *testing.T, args ...string) []byte {
	t.Helper()
	cmd := exec.Command("go", append([]string{"list"}, args...)...)
	cmd.Dir = "../../.."
	var errs bytes.Buffer
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v: %v\n%s", cmd, err, &errs)
	}
	return out
}

type pkg struct {
	ImportPath string
	Standard   bool
	Imports    []string
}

func TestImports(t *testing.T) {
	out := goList(t, "-json=ImportPath,Standard,Imports", "./...")
	seen := 0
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var p pkg
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		seen++
		if !slices.Contains(order, top(p.ImportPath)) {
			t.Errorf("%s: its top folder has no place in order", p.ImportPath)
		}
		own := strings.TrimPrefix(p.ImportPath, module)
		for _, imp := range p.Imports {
			if from, to := top(p.ImportPath), top(imp); to != "" && own != "/internal/testkit/testbed" && from != to && slices.Index(order, from) <= slices.Index(order, to) {
				t.Errorf("%s imports %s: in the order of the top folders (order), %s must come before %s", p.ImportPath, imp, to, from)
			}
			for _, l := range limits {
				inModule := strings.TrimPrefix(imp, module)
				foreign := external(imp) && !exempt(inModule, l.Only)
				if under(own, l.From) && (foreign || slices.Contains(strings.Fields(l.Not), imp)) {
					t.Errorf("%s imports %s: %s", p.ImportPath, imp, l.Why)
				}
			}
			for _, r := range rules {
				if under(own, r.From) && !exempt(own, r.Except) && forbidden(imp, r.To, own, r.From) {
					t.Errorf("%s imports %s: %s", p.ImportPath, imp, r.Why)
				}
			}
		}
	}
	if seen < 10 {
		t.Fatalf("only %d packages listed: this test has lost its subject", seen)
	}
}

// forbidden reports whether an import breaks a rule. An empty To forbids all imports outside the standard library,
// except packages below From.
func forbidden(imp, to, own, from string) bool {
	if to != "" {
		return imp == to || strings.HasPrefix(imp, to+"/") && !under(strings.TrimPrefix(imp, module), own)
	}
	return external(imp) && !strings.HasPrefix(imp, module+from+"/")
}

// top returns the top folder of a package of this module, or "".
func top(path string) string {
	inside, ok := strings.CutPrefix(path, module+"/")
	if !ok {
		return ""
	}
	folder, _, _ := strings.Cut(inside, "/")
	return folder
}

// external reports whether an import is not of the standard library.
func external(imp string) bool {
	first, _, _ := strings.Cut(imp, "/")
	return strings.Contains(first, ".")
}

func under(path, root string) bool {
	return root == "/" || path == root || strings.HasPrefix(path, root+"/")
}

func exempt(path, list string) bool {
	for _, e := range strings.Fields(list) {
		if under(path, e) {
			return true
		}
	}
	return false
}

// TestEveryPackageHasAComment fails for a package without a doc comment.
func TestEveryPackageHasAComment(t *testing.T) {
	out := goList(t, "-f", "{{if .GoFiles}}{{.ImportPath}}\t{{.Doc}}{{end}}", "./...")
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	if len(lines) < 10 {
		t.Fatalf("only %d packages listed", len(lines))
	}
	for _, line := range lines {
		if path, doc, _ := strings.Cut(line, "\t"); doc == "" && !strings.HasSuffix(path, "/v1") {
			t.Errorf("%s has no package comment", path)
		}
	}
}

// TestServerLinksNoLab checks that no package that fared links, directly or through others, is of a laboratory or a
// transport, which fared-lab links, or of fared-kube. The exception is tcpslots, which places connections of any
// program, for `fared exec`.
func TestServerLinksNoLab(t *testing.T) {
	out := goList(t, "-deps", "./cmd/fared")
	linked := strings.Fields(string(out))
	if !slices.Contains(linked, module+"/daemon") || !slices.Contains(linked, module+"/transport/tcpslots") {
		t.Fatal("fared links no daemon: this test has lost its subject")
	}
	for _, p := range linked {
		inModule, ours := strings.CutPrefix(p, module)
		if ours && exempt(inModule, "/lab /topo /fleet/worker /traffic /transport /kube /cmd/fared-lab /fleet/drain /fleet/etcd /fleet/configmap") && inModule != "/transport/tcpslots" {
			t.Errorf("fared links %s", p)
		}
	}
}
