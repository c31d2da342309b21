package softdev

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/testbed"
)

const page = "../../docs/rdma.md"

var update = flag.Bool("update", false, "rewrite the table of docs/rdma.md")

// results are the cases of a suite of programs that nobody here wrote.
type results struct {
	name            string
	passed, refused int
	reasons         []string // of refusals, without repetitions
}

// refusals are the words in which a program reports what the device does not have, and what that is.
var refusals = []struct{ said, lacks string }{
	{"rdma_cm is not supported", "`rdma_cm`"},
	{"Couldn't create QP", "UC"}, // ibv_uc_pingpong
	{"Couldn't Open the XRC Domain", "XRC"},
	{"failed to create QP: Operation not supported", "UC"},
	{"Unable to create QP", "UC"},
	{"Error opening XRC domain", "XRC"},
	{"failed to modify QP to RTR", "queue pairs without a GID, as any RoCE device"},
	{"failed to create address handle", "queue pairs without a GID, as any RoCE device"},
}

// add judges a case by what the program has said and how it has ended. A signal, a timeout or an unknown reason fails
// the test.
func (r *results) add(t *testing.T, command, said string, err error) {
	t.Helper()
	if err == nil {
		r.passed++
		return
	}
	for _, x := range refusals {
		if strings.Contains(said, x.said) && !regexp.MustCompile(`signal:|core dumped|exit status (124|13[0-9])`).MatchString(said+err.Error()) {
			r.refused++
			if !slices.Contains(r.reasons, x.lacks) {
				r.reasons = append(r.reasons, x.lacks)
			}
			return
		}
	}
	t.Errorf("%s: %s: %v\n%s", r.name, command, err, said)
}

// pair runs a program at both ends, and adds the result.
func (r *results) pair(t *testing.T, e *ends, environment []string, command string, more ...string) {
	t.Helper()
	words := append(append(slices.Clone(environment), strings.Fields(command)...), more...)
	listen := port()
	s := e.environment(serverAddress, append(words, "-p", listen)...)
	server := e.server.Start(t, s[0], s[1:]...)
	c := e.environment(clientAddress, append(words, "-p", listen, serverAddress)...)
	netnstest.Eventually(t, time.Minute, func() error {
		if out, err := e.server.Output("ss", "-tlnH"); server.Running() == nil && (err != nil || !strings.Contains(string(out), ":"+listen+" ")) {
			return fmt.Errorf("no server listens: %w", err)
		}
		return nil
	})
	if server.Running() != nil { // refused
		r.add(t, command, server.Log(), fmt.Errorf("the server has ended"))
		return
	}
	out, err := e.client.Output(c[0], c[1:]...)
	said := fmt.Sprint(string(out), err)
	server.AwaitEnd(t)
	r.add(t, command, said+server.Log(), err)
}

// TestSuites runs suites of others over fared_soft0, and writes what passes and what is refused into the page. Nothing
// hangs, crashes or fails in another way.
func TestSuites(t *testing.T) {
	gate.Slow(t, gate.C, "some hundred programs")
	e := newEnds(t, "ibv_rc_pingpong", "rping", "ib_write_bw", "ucx_perftest", "mpicc.openmpi", "mpirun.openmpi", "mpicc.mpich", "mpirun.mpich", "fio", "qperf",
		"/usr/lib/python3/dist-packages/pyverbs")
	all := []results{pyverbs(t, e), examples(t, e), perftest(t, e), ucx(t, e), mpi(t, e, "openmpi", "Open MPI"), mpi(t, e, "mpich", "MPICH"), others(t, e)}
	var b strings.Builder
	b.WriteString("| suite | passed | refused | what is refused |\n|---|---|---|---|\n")
	for _, r := range all {
		fmt.Fprintf(&b, "| %s | %d | %d | %s |\n", r.name, r.passed, r.refused, strings.Join(r.reasons, ", "))
	}
	t.Log("\n" + b.String())
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	switch {
	case t.Failed() || strings.Contains(string(text), b.String()):
	case *update:
		testbed.Table(t, page, "TestSuites", b.String())
	default:
		t.Error("the page has another table: run the test with -update")
	}
}

// version returns that of an installed Debian package, without Debian's part.
func version(t *testing.T, pkg string) string {
	t.Helper()
	v := strings.TrimSpace(run(t, "dpkg-query", "-W", "-f", "${Version}", pkg))
	upstream, _, _ := strings.Cut(v, "-")
	return upstream
}

// notOfTheDevice are the reasons of rdma-core's tests for leaving themselves out that speak of another device, or of
// the machine.
var notOfTheDevice = regexp.MustCompile(`(?i)mlx5|efa device|cuda|dmabuf|dri/render|huge pages|pci device|net interface|all gid indices`)

// pyverbs runs rdma-core's tests in Python.
func pyverbs(t *testing.T, e *ends) results {
	r := results{name: "rdma-core " + version(t, "python3-pyverbs") + ", tests in Python"}
	out, err := e.server.Output("timeout", "300", "env", "LD_PRELOAD="+e.library, "FARED_SOFT_ADDRESS="+serverAddress, "/usr/bin/python3", "tests/suite.py", t.TempDir(), "fared_soft0")
	if err != nil {
		t.Errorf("%s: %v\n%s", r.name, err, out)
	}
	for line := range strings.Lines(string(out)) {
		result, rest, _ := strings.Cut(line, "\t")
		_, reason, _ := strings.Cut(rest, "\t")
		switch {
		case result == "passed":
			r.passed++
		case result == "skipped" && !notOfTheDevice.MatchString(reason), strings.Contains(line, "test_imported_") && strings.Contains(reason, "Bad file descriptor"):
			r.refused++
		case result != "skipped":
			t.Errorf("%s: %s", r.name, line)
		}
	}
	r.reasons = []string{"memory windows, XRC, UC, raw packets, extended completion queues, device memory, on-demand paging, parent domains, import"}
	return r
}

// examples runs the example programs of rdma-core. Those of rdma_cm need no client, because each end is refused.
func examples(t *testing.T, e *ends) results {
	r := results{name: "rdma-core " + version(t, "ibverbs-utils") + ", examples"}
	for _, program := range []string{"rc", "ud", "uc", "srq", "xsrq"} {
		for _, options := range []string{"", "-e"} {
			r.pair(t, e, nil, "ibv_"+program+"_pingpong -g 0 "+options, "-d", "fared_soft0")
		}
	}
	for _, command := range []string{"rping -s", "ucmatose", "udaddy", "cmtime", "mckey -m 239.0.0.1", "rdma_server", "rdma_xserver", "rcopy", "rstream", "riostream", "udpong -s " + serverAddress} {
		words := e.environment(serverAddress, strings.Fields(command)...)
		out, err := e.server.Output(words[0], words[1:]...)
		r.add(t, command, fmt.Sprint(string(out), err), err)
	}
	return r
}

// perftest runs each of its programs with what it can vary. Completions stand for 16 operations or a divisor, so that
// perftest, which counts whole ones, ends. With -F it also ends where it cannot measure the clock of a busy processor.
func perftest(t *testing.T, e *ends) results {
	r := results{name: "perftest " + version(t, "perftest")}
	for _, verb := range []string{"write", "read", "send", "atomic"} {
		for _, kind := range []string{"bw", "lat"} {
			variants := []string{"", "-e", "-a", "-c UC", "-c XRC", "-R"}
			switch {
			case verb == "atomic":
				variants = []string{"", "-e", "-A CMP_AND_SWAP", "-R"}
			case verb == "read":
				variants = []string{"", "-e", "-a", "-R"}
			case verb == "send":
				variants = append(variants, "-c UD", "-r 64")
			}
			if verb == "write" {
				variants = slices.DeleteFunc(variants, func(v string) bool { return v == "-e" }) // a WRITE has no event at the other end
			}
			if kind == "bw" {
				variants = append(variants, "-b", "-q 8", "-b -q 4 -t 16")
			}
			for _, v := range variants {
				r.pair(t, e, nil, fmt.Sprintf("ib_%s_%s -F -n 64 %s", verb, kind, v), "-d", "fared_soft0")
			}
		}
	}
	return r
}

// ucx runs the tests of ucx_perftest over reliable connections, and those of messages over datagrams.
func ucx(t *testing.T, e *ends) results {
	r := results{name: "UCX " + version(t, "ucx-utils") + ", ucx_perftest"}
	messages := []string{"tag_lat", "tag_bw", "tag_sync_lat", "tag_sync_bw", "stream_bw", "stream_lat", "ucp_am_lat", "ucp_am_bw"}
	memory := []string{"ucp_put_lat", "ucp_put_bw", "ucp_get", "ucp_add", "ucp_fadd", "ucp_swap", "ucp_cswap"}
	for _, transport := range []string{"rc_v,ud_v", "ud_v"} {
		for _, test := range append(messages, memory...) {
			if transport == "ud_v" && slices.Contains(memory, test) {
				continue // UCX has none over datagrams
			}
			for _, size := range []string{"8", "100000"} {
				if size != "8" && (strings.HasSuffix(test, "add") || strings.HasSuffix(test, "swap")) {
					continue
				}
				r.pair(t, e, []string{"env", "UCX_TLS=" + transport, "UCX_NET_DEVICES=fared_soft0:1"}, "ucx_perftest -n 200 -w 10 -t "+test+" -s "+size)
			}
		}
	}
	return r
}

// mpi runs a program that checks the results of MPI, between ranks that have nothing but the device.
func mpi(t *testing.T, e *ends, kind, name string) results {
	r := results{name: name + " " + version(t, map[string]string{"openmpi": "openmpi-bin", "mpich": "mpich"}[kind]) + ", a program that checks collectives, messages and one-sided access"}
	program := filepath.Join(t.TempDir(), "mpi")
	run(t, "mpicc."+kind, "-O1", "-Wall", "-Werror", "-o", program, "tests/mpi.c")
	for _, ranks := range []int{2, 4} {
		words := e.environment(serverAddress, "UCX_TLS=rc_v,ud_v,self", "UCX_NET_DEVICES=fared_soft0:1", "OMPI_MCA_pml=ucx", "OMPI_MCA_rmaps_base_oversubscribe=1", "OMPI_ALLOW_RUN_AS_ROOT=1",
			"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1", "mpirun."+kind, "-n", fmt.Sprint(ranks), program)
		cmd := exec.Command("ip", append([]string{"netns", "exec", e.server.Name}, words...)...)
		out, err := cmd.CombinedOutput()
		if err == nil && (strings.Count(string(out), ": right") != ranks || len(regexp.MustCompile(`fared_soft0: sent [1-9]`).FindAll(out, -1)) != ranks) {
			err = fmt.Errorf("not %d ranks were right, over the device", ranks)
		}
		r.add(t, fmt.Sprint(ranks, " ranks"), string(out), err)
	}
	return r
}

// others runs programs that connect by rdma_cm, or by no GID.
func others(t *testing.T, e *ends) results {
	r := results{name: "fio " + version(t, "fio") + ", qperf " + version(t, "qperf")}
	words := e.environment(serverAddress, "fio", "--name=receiver", "--ioengine=rdma", "--port=13579", "--bs=64k", "--size=1m", "--verb=write", "--rw=read")
	out, err := e.server.Output(words[0], words[1:]...)
	r.add(t, "fio", fmt.Sprint(string(out), err), err)
	s := e.environment(serverAddress, "qperf")
	server := e.server.Start(t, s[0], s[1:]...)
	server.AwaitSocket(t, e.server, "-tlnH", ":19765 ")
	for _, test := range []string{"rc_lat", "rc_bw", "rc_rdma_read_bw", "rc_rdma_write_bw", "ud_lat", "uc_lat", "-cm 1 rc_lat"} {
		c := e.environment(clientAddress, append([]string{"qperf", "-t", "1", "-li", "fared_soft0:1", "-ri", "fared_soft0:1", serverAddress}, strings.Fields(test)...)...)
		out, err := e.client.Output(c[0], c[1:]...)
		said := fmt.Sprint(string(out), err)
		if err == nil && strings.Contains(said, "failed to") { // its exit code is 0
			err = fmt.Errorf("no result")
		}
		r.add(t, "qperf "+test, said, err)
	}
	return r
}
