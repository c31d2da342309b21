package cni_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/testkit/binary"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/pods/podstest"
)

// newBed returns a runtime, an agent that does not run yet, and the network namespace of a pod.
func newBed(t *testing.T) (*runtime, *podstest.Agent, *netnstest.Namespace) {
	t.Helper()
	netnstest.Require(t)
	r := newRuntime(t, netnstest.New(t))
	return r, podstest.New(t, r.socket), netnstest.New(t)
}

func (r *runtime) calls(agent *podstest.Agent, want ...string) {
	r.t.Helper()
	if got := agent.Calls(); !slices.Equal(got, want) {
		r.t.Errorf("calls %q, want %q", got, want)
	}
}

// TestRails follows a pod with two networks from ADD to DEL, as Multus calls them: one attachment has the devices of
// both, and its id is the pod's UID.
func TestRails(t *testing.T) {
	r, agent, pod := newBed(t)
	agent.Start()
	uid := [2]string{"K8S_POD_UID", "7d1c-1"}
	a := r.direct("rail-a", pod, "net1", map[string]any{"subPorts": map[string]string{"net1": "eth0"}}, "10.0.0.7/31", "fd00::7/64", "fe80::1/64")
	b := r.direct("rail-b", pod, "net2", nil, "10.0.1.7/31")
	first, second := r.pod("box", pod, "net1", uid), r.pod("box", pod, "net2", uid)
	result := r.mustAdd(a, first)
	if len(result.Interfaces) != 2 || result.Interfaces[1].Mtu != 9000 || len(result.IPs) != 3 || len(result.Routes) != 1 {
		t.Errorf("the result has changed: %+v", result)
	}
	r.mustAdd(b, second)
	r.calls(agent, "attach 7d1c-1 net1=eth0", "attach 7d1c-1 net1=eth0 net2")
	if err := r.check(b, second); err != nil {
		t.Errorf("CHECK: %v", err)
	}
	if err := r.status(a); err != nil {
		t.Errorf("STATUS: %v", err)
	}
	r.mustDel(a, first)
	r.mustDel(a, first)
	r.calls(agent, "attach 7d1c-1 net2")
	r.mustDel(b, second)
	r.mustDel(b, second)
	r.calls(agent, "detach 7d1c-1")
	if err := r.records(); err != nil {
		t.Error(err)
	}
	if text := r.warnings(); text != "" {
		t.Errorf("warnings: %s", text)
	}
}

// TestAgentIsDown checks that pods start and end without the agent, and that their records have the rest.
func TestAgentIsDown(t *testing.T) {
	r, agent, pod := newBed(t)
	rail := r.direct("rail", pod, "net1", nil)
	box := r.pod("box", pod, "net1")
	r.mustAdd(rail, box)
	if text := r.warnings(); strings.Count(text, "\n") != 1 || !strings.Contains(text, "warning: pod box starts without its planes") || !strings.Contains(text, r.socket) {
		t.Errorf("warnings: %s", text)
	}
	if got := code(t, r.status(rail)); got != types.ErrPluginNotAvailable {
		t.Errorf("STATUS: code %d", got)
	}
	if got := code(t, r.check(rail, box)); got != types.ErrTryAgainLater {
		t.Errorf("CHECK: code %d", got)
	}
	agent.Start()
	if got := code(t, r.check(rail, box)); got != types.ErrUnknownContainer {
		t.Errorf("CHECK before the agent has read the record: code %d", got)
	}
	agent.Stop()
	if err := r.records("box"); err != nil {
		t.Error(err)
	}
	r.mustDel(rail, box)
	if err := r.records("box"); err != nil { // for the agent, which may have the attachment from before
		t.Error(err)
	}
	agent.Start()
	r.mustDel(rail, box)
	r.calls(agent, "detach box")
	if err := r.records(); err != nil {
		t.Error(err)
	}
}

// TestRefusals checks that a refusal fails ADD, names the network and leaves the former state.
func TestRefusals(t *testing.T) {
	r, agent, pod := newBed(t)
	agent.Start()
	agent.Refuse(func(req *farev1.AttachRequest) error {
		if slices.ContainsFunc(req.Devices, func(d *farev1.AttachDevice) bool { return d.Device == "net2" }) {
			return status.Error(codes.FailedPrecondition, "net2 has no sub-port: name one of eth0, eth1")
		}
		return nil
	})
	good, bad := r.direct("good", pod, "net1", nil), r.direct("bad", pod, "net2", nil)
	_, err := r.add(bad, r.pod("alone", pod, "net2"))
	if code(t, err) != types.ErrInternal || !strings.Contains(err.Error(), `network "bad": cannot attach net2: net2 has no sub-port: name one of eth0`) {
		t.Errorf("error %v", err)
	}
	r.mustAdd(good, r.pod("box", pod, "net1"))
	if _, err := r.add(bad, r.pod("box", pod, "net2")); err == nil {
		t.Error("the refused device was added")
	}
	r.mustDel(bad, r.pod("box", pod, "net2"))
	if err := agent.Has("box"); err != nil {
		t.Error(err)
	}
	if err := r.records("box"); err != nil {
		t.Error(err)
	}
	agent.Refuse(func(*farev1.AttachRequest) error {
		return status.Error(codes.Unimplemented, "driver bpf does not serve pods")
	})
	r.warnings()
	r.mustAdd(good, r.pod("other", pod, "net1"))
	if text := r.warnings(); !strings.Contains(text, "driver bpf does not serve pods") {
		t.Errorf("warnings: %s", text)
	}
}

// TestWaits checks that ADD returns when weights are in effect, and without them after its time.
func TestWaits(t *testing.T) {
	r, agent, pod := newBed(t)
	agent.Start()
	release := agent.Withhold()
	r.mustAdd(r.direct("short", pod, "net1", map[string]any{"wait": "10ms"}), r.pod("box", pod, "net1"))
	if text := r.warnings(); !strings.Contains(text, "no weights are in effect after 10ms") {
		t.Errorf("warnings: %s", text)
	}
	agent.Calls()
	go func() {
		defer release()
		for end := time.Now().Add(time.Minute); len(agent.Calls()) == 0 && time.Now().Before(end); {
			time.Sleep(time.Millisecond)
		}
	}()
	r.mustAdd(r.direct("long", pod, "net1", map[string]any{"wait": "30s"}), r.pod("other", pod, "net1"))
	if text := r.warnings(); text != "" {
		t.Errorf("warnings: %s", text)
	}
}

// TestGC checks that GC ends the attachments of its network that are not valid, and no other.
func TestGC(t *testing.T) {
	r, agent, pod := newBed(t)
	agent.Start()
	a, b := r.direct("a", pod, "net1", nil), r.direct("b", pod, "net2", nil)
	for _, box := range []string{"kept", "gone", "half"} {
		r.mustAdd(a, r.pod(box, pod, "net1"))
	}
	for _, box := range []string{"half", "other"} {
		r.mustAdd(b, r.pod(box, pod, "net2"))
	}
	agent.Calls()
	if err := r.gc(a, types.GCAttachment{ContainerID: "kept", IfName: "net1"}, types.GCAttachment{ContainerID: "gone", IfName: "net9"}); err != nil {
		t.Fatal(err)
	}
	// libcni first calls DEL for what its cache has, then GC.
	if err := agent.Has("half", "kept", "other"); err != nil {
		t.Error(err)
	}
	if got := slices.Sorted(slices.Values(agent.Calls())); !slices.Equal(got, []string{"attach half net2", "detach gone"}) {
		t.Errorf("calls %q", got)
	}
	if err := os.RemoveAll(filepath.Join(r.dir, "cache")); err != nil { // GC alone
		t.Fatal(err)
	}
	agent.Stop()
	if err := r.gc(a); err != nil {
		t.Errorf("GC without an agent: %v", err)
	}
	if err := r.records("half", "kept", "other"); err != nil {
		t.Error(err)
	}
	agent.Start()
	if err := r.gc(a); err != nil {
		t.Error(err)
	}
	if err := agent.Has("half", "other"); err != nil {
		t.Error(err)
	}
}

// TestNewSandbox checks that the DEL of a pod's former sandbox does not detach the new one, which has the same id.
func TestNewSandbox(t *testing.T) {
	r, agent, pod := newBed(t)
	agent.Start()
	rail, uid := r.direct("rail", pod, "net1", nil), [2]string{"K8S_POD_UID", "u"}
	r.mustAdd(rail, r.pod("old", pod, "net1", uid))
	r.mustAdd(rail, r.pod("new", pod, "net1", uid))
	r.mustDel(rail, r.pod("old", pod, "net1", uid))
	if err := agent.Has("u"); err != nil {
		t.Error(err)
	}
	r.mustDel(rail, r.pod("new", pod, "net1", uid))
	if err := agent.Has(); err != nil {
		t.Error(err)
	}
}

// TestConfigurations checks that errors name the network, the key and the remedy, and that DEL succeeds in spite of
// them.
func TestConfigurations(t *testing.T) {
	r, agent, pod := newBed(t)
	agent.Start()
	for _, test := range []struct {
		key   string
		value any
		want  string
	}{
		{"wait", "1", `wait "1" is not a duration from 0s to 30s, such as 1s`},
		{"wait", "31s", "from 0s to 30s"},
		{"wait", 1, "wait has a number"},
		{"subPort", map[string]string{}, `key "subPort" is unknown: did you mean "subPorts"?`},
		{"subports", map[string]string{}, `did you mean "subPorts"?`},
		{"subPorts", "eth0", "subPorts has a string"},
		{"socket", "agent.sock", `socket "agent.sock" is no absolute path`},
		{"prevResult", nil, "there is no prevResult"},
		{"prevResult", map[string]any{"cniVersion": "9.0"}, "prevResult: "},
	} {
		list := r.direct("rail", pod, "net1", map[string]any{test.key: test.value})
		_, err := r.add(list, r.pod("box", pod, "net1"))
		if err == nil || !strings.Contains(err.Error(), `network "rail": `) || !strings.Contains(err.Error(), test.want) || code(t, err) != types.ErrInvalidNetworkConfig {
			t.Errorf("%s %v: %v", test.key, test.value, err)
		}
		r.mustDel(list, r.pod("box", pod, "net1"))
	}
	r.calls(agent)
	none := r.network("rail", map[string]any{"type": "fared", "prevResult": map[string]any{"cniVersion": "1.1.0"}})
	r.mustAdd(none, r.pod("box", pod, "net1"))
	if text := r.warnings(); !strings.Contains(text, "have put no device into the pod") {
		t.Errorf("warnings: %s", text)
	}
	r.calls(agent)
}

// TestByHand checks what fared does without arguments in a plugin's environment and outside of one.
func TestByHand(t *testing.T) {
	run := func(env string, args ...string) string {
		cmd := exec.Command(binary.Fared(t), args...)
		cmd.Env = append(os.Environ(), env)
		out, _ := cmd.CombinedOutput() // the text has the verdict
		return string(out)
	}
	for _, test := range []struct{ env, args, want string }{
		{"CNI_COMMAND=VERSION", "", `"supportedVersions":["0.3.0","0.3.1","0.4.0","1.0.0","1.1.0"]`},
		{"CNI_COMMAND=VERSION", "version", "fared "},
		{"CNI_COMMAND=ADD", "", `"code":4,"msg":"required env variables [CNI_CONTAINERID`},
		{"CNI_COMMAND=", "cni", "is a network plugin that a container runtime calls"},
		{"CNI_COMMAND=", "", "Usage:"},
	} {
		if out := strings.ReplaceAll(run(test.env, strings.Fields(test.args)...), `": `, `":`); !strings.Contains(strings.ReplaceAll(out, "\n    ", ""), test.want) {
			t.Errorf("%s fared %s: %s", test.env, test.args, out)
		}
	}
}
