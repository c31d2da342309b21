package cni_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/version"

	"github.com/fared/fared/internal/testkit/binary"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/testbed"
	"github.com/fared/fared/pods"
)

var _ = gate.Package{WithoutRaceDetector: "drives other processes"}

// runtime is a container runtime on a host. Its directory of plugins has a link to fared.
type runtime struct {
	t      *testing.T
	host   *netnstest.Namespace
	dir    string
	socket string
	cni    *libcni.CNIConfig
	stderr bytes.Buffer // of all plugins
}

func newRuntime(t *testing.T, host *netnstest.Namespace) *runtime {
	t.Helper()
	dir := testbed.ShortDir(t)
	r := &runtime{t: t, host: host, dir: dir, socket: filepath.Join(dir, "agent.sock")}
	if err := errors.Join(os.Mkdir(r.bin(), 0o755), os.Symlink(binary.Fared(t), filepath.Join(r.bin(), "fared"))); err != nil {
		t.Fatal(err)
	}
	r.cni = libcni.NewCNIConfigWithCacheDir([]string{r.bin()}, filepath.Join(dir, "cache"),
		&invoke.DefaultExec{RawExec: &invoke.RawExec{Stderr: &r.stderr}, PluginDecoder: version.PluginDecoder{}})
	return r
}

func (r *runtime) bin() string { return filepath.Join(r.dir, "bin") }

func (r *runtime) store() pods.Store { return pods.Store{Dir: pods.Folder(r.socket)} }

// warnings returns what the plugins have written to standard error since the last call.
func (r *runtime) warnings() string {
	defer r.stderr.Reset()
	return r.stderr.String()
}

// network returns a network of plugins, each of which is an object of JSON. The last one gets the socket.
func (r *runtime) network(name string, plugins ...map[string]any) *libcni.NetworkConfigList {
	r.t.Helper()
	if last := plugins[len(plugins)-1]; last["type"] == "fared" && last["socket"] == nil {
		last["socket"] = r.socket
	}
	text, err := json.Marshal(map[string]any{"cniVersion": "1.1.0", "name": name, "plugins": plugins})
	if err != nil {
		r.t.Fatal(err)
	}
	list, err := libcni.NetworkConfFromBytes(text)
	if err != nil {
		r.t.Fatal(err)
	}
	return list
}

// direct returns a network of fared alone, with the result of a plugin that has put a device into the pod: literally in
// the configuration, where a runtime puts it.
func (r *runtime) direct(name string, pod *netnstest.Namespace, device string, keys map[string]any, addresses ...string) *libcni.NetworkConfigList {
	r.t.Helper()
	ips := []any{}
	for _, a := range addresses {
		ips = append(ips, map[string]any{"interface": 1, "address": a})
	}
	plugin := map[string]any{"type": "fared", "prevResult": map[string]any{
		"cniVersion": "1.1.0", "interfaces": []any{map[string]any{"name": "veth7", "mac": "02:00:00:00:00:07"}, map[string]any{"name": device, "mtu": 9000, "sandbox": pod.Path()}}, "ips": ips,
		"routes": []any{map[string]any{"dst": "0.0.0.0/0", "gw": "192.0.2.9"}},
	}}
	for key, value := range keys {
		plugin[key] = value
	}
	return r.network(name, plugin)
}

// pod returns the parameters of a call.
func (r *runtime) pod(container string, space *netnstest.Namespace, ifName string, args ...[2]string) *libcni.RuntimeConf {
	return &libcni.RuntimeConf{ContainerID: container, NetNS: space.Path(), IfName: ifName, Args: args}
}

func (r *runtime) add(list *libcni.NetworkConfigList, rt *libcni.RuntimeConf) (result types.Result, err error) {
	err = r.host.Do(func() error {
		result, err = r.cni.AddNetworkList(context.Background(), list, rt)
		return err
	})
	return result, err
}

func (r *runtime) mustAdd(list *libcni.NetworkConfigList, rt *libcni.RuntimeConf) *current.Result {
	r.t.Helper()
	result, err := r.add(list, rt)
	if err != nil {
		r.t.Fatalf("ADD %s %s: %v\n%s", list.Name, rt.IfName, err, r.warnings())
	}
	converted, err := current.NewResultFromResult(result)
	if err != nil {
		r.t.Fatal(err)
	}
	return converted
}

func (r *runtime) mustDel(list *libcni.NetworkConfigList, rt *libcni.RuntimeConf) {
	r.t.Helper()
	if err := r.host.Do(func() error { return r.cni.DelNetworkList(context.Background(), list, rt) }); err != nil {
		r.t.Fatalf("DEL %s %s: %v\n%s", list.Name, rt.IfName, err, r.warnings())
	}
}

func (r *runtime) check(list *libcni.NetworkConfigList, rt *libcni.RuntimeConf) error {
	return r.host.Do(func() error { return r.cni.CheckNetworkList(context.Background(), list, rt) })
}

func (r *runtime) status(list *libcni.NetworkConfigList) error {
	return r.host.Do(func() error { return r.cni.GetStatusNetworkList(context.Background(), list) })
}

func (r *runtime) gc(list *libcni.NetworkConfigList, valid ...types.GCAttachment) error {
	return r.host.Do(func() error {
		return r.cni.GCNetworkList(context.Background(), list, &libcni.GCArgs{ValidAttachments: valid})
	})
}

// code returns the code of a plugin's error, 0 for none.
func code(t *testing.T, err error) uint {
	t.Helper()
	var failed *types.Error
	if err == nil {
		return 0
	}
	if !errors.As(err, &failed) {
		t.Fatalf("%T is no error of a plugin: %v", err, err)
	}
	return failed.Code
}

// records returns an error unless the records are those of these containers.
func (r *runtime) records(want ...string) error {
	if got, err := r.store().Containers(); fmt.Sprint(got) != fmt.Sprint(want) {
		return fmt.Errorf("records %q, want %q, %v", got, want, err)
	}
	return nil
}
