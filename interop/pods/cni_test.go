package pods

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/version"

	"github.com/fared/fared/internal/testkit/binary"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/packettap"
)

// plugins builds host-device and static into a directory, and links fared.
func plugins(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	build := exec.Command("go", "build", "-C", "testdata/plugins", "-o", dir+"/", "tool", "./cri")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", build, err, out)
	}
	if err := os.Symlink(binary.Fared(t), filepath.Join(dir, "fared")); err != nil {
		t.Fatal(err)
	}
	return dir
}

// runtime calls plugins on the server for the pod.
type runtime struct {
	*bed
	cni    *libcni.CNIConfig
	rails  [planes]*libcni.NetworkConfigList
	stderr bytes.Buffer
}

func newRuntime(b *bed) *runtime {
	b.t.Helper()
	r := &runtime{bed: b}
	r.cni = libcni.NewCNIConfigWithCacheDir([]string{plugins(b.t)}, filepath.Join(b.dir, "cache"),
		&invoke.DefaultExec{RawExec: &invoke.RawExec{Stderr: &r.stderr}, PluginDecoder: version.PluginDecoder{}})
	for p := range planes {
		text := fmt.Sprintf(`{"cniVersion": "1.1.0", "name": "rail-%d", "plugins": [
			{"type": "host-device", "device": "v%[1]d", "ipam": {"type": "static", "addresses": [{"address": "172.16.%[1]d.9/24"}]}},
			{"type": "fared", "socket": %[2]q}]}`, p, b.socket())
		list, err := libcni.NetworkConfFromBytes([]byte(text))
		if err != nil {
			b.t.Fatal(err)
		}
		r.rails[p] = list
	}
	return r
}

// each calls a function for each network, on the server, and returns the plugins' warnings.
func (r *runtime) each(what string, call func(*libcni.NetworkConfigList, *libcni.RuntimeConf) error) string {
	r.t.Helper()
	r.stderr.Reset()
	for p, rail := range r.rails {
		rt := &libcni.RuntimeConf{ContainerID: "box", NetNS: r.pod.Path(), IfName: fmt.Sprint("net", p+1), Args: [][2]string{{"IgnoreUnknown", "1"}, {"K8S_POD_UID", "0f-1"}}}
		if err := r.Server.Do(func() error { return call(rail, rt) }); err != nil {
			r.t.Fatalf("%s %s: %v\n%s", what, rail.Name, err, r.stderr.String())
		}
	}
	return r.stderr.String()
}

func (r *runtime) add() string {
	r.t.Helper()
	return r.each("ADD", func(list *libcni.NetworkConfigList, rt *libcni.RuntimeConf) error {
		_, err := r.cni.AddNetworkList(context.Background(), list, rt)
		return err
	})
}

func (r *runtime) del() string {
	r.t.Helper()
	return r.each("DEL", func(list *libcni.NetworkConfigList, rt *libcni.RuntimeConf) error {
		return r.cni.DelNetworkList(context.Background(), list, rt)
	})
}

func (r *runtime) gc() string {
	r.t.Helper()
	return r.each("GC", func(list *libcni.NetworkConfigList, _ *libcni.RuntimeConf) error {
		return r.cni.GCNetworkList(context.Background(), list, nil)
	})
}

func (r *runtime) check() {
	r.t.Helper()
	r.each("CHECK", func(list *libcni.NetworkConfigList, rt *libcni.RuntimeConf) error {
		return errors.Join(r.cni.CheckNetworkList(context.Background(), list, rt), r.cni.GetStatusNetworkList(context.Background(), list))
	})
}

// TestCNI adds and deletes a pod's two rails by libcni: the devices are moved by the plugin host-device before fared.
// The agent is killed between ADD and DEL, and before ADD; GC ends what DEL has not. After each round nothing is left.
func TestCNI(t *testing.T) {
	gate.Slow(t, gate.Kernel, "500 pods by 6,000 calls of plugins")
	b := newBed(t, packettap.End)
	r := newRuntime(b)
	b.start()
	b.program()
	var first []time.Duration
	for round := range rounds() {
		b.round(r, round, &first)
		if t.Failed() {
			t.Fatalf("round %d", round)
		}
	}
	slices.Sort(first)
	t.Logf("%d rounds; first packet after ADD, n %d: p50 %v, p99 %v, most %v", rounds(), len(first), first[len(first)/2], first[len(first)*99/100], first[len(first)-1])
}

// rounds is FARED_POD_ROUNDS, or 500.
func rounds() int {
	n := 500
	_, _ = fmt.Sscan(os.Getenv("FARED_POD_ROUNDS"), &n) // stays 500 if it is absent
	return n
}

// round is the life of one pod.
func (b *bed) round(r *runtime, round int, first *[]time.Duration) {
	b.t.Helper()
	absent := round%10 == 6
	if absent {
		b.agent.Kill()
	}
	warnings := r.add()
	if absent && !strings.Contains(warnings, "warning") {
		b.t.Fatalf("round %d: no warning", round)
	}
	if !absent && warnings != "" { // the machine is busy: the weights follow
		b.t.Logf("round %d: %s", round, warnings)
	}
	if absent {
		b.start()
		b.reaches()
	} else {
		*first = append(*first, b.reaches())
		if round%10 == 0 {
			r.check()
		}
	}
	if round%10 == 3 {
		b.agent.Kill()
	}
	if round%10 == 8 {
		r.gc()
	} else {
		r.del()
	}
	if round%10 == 3 {
		b.start()
	}
	b.empty()
}
