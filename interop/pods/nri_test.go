package pods

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/nri/pkg/adaptation"
	"github.com/containerd/nri/pkg/api"

	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/packettap"
	"github.com/fared/fared/internal/testkit/testlog"
	"github.com/fared/fared/pods/nri"
)

// nriRuntime is the runtime side of NRI, with the plugin `fared nri`.
type nriRuntime struct {
	*bed
	*adaptation.Adaptation
	log       testlog.Log
	connected atomic.Bool
}

func newNRI(b *bed) *nriRuntime {
	b.t.Helper()
	r := &nriRuntime{bed: b}
	adaptation.SetPluginRequestTimeout(time.Minute) // holds end by weights, however busy the machine is
	var err error
	r.Adaptation, err = adaptation.New("test", "2.0.0",
		func(ctx context.Context, synchronize adaptation.SyncCB) error {
			_, err := synchronize(ctx, nil, nil)
			r.connected.Store(err == nil)
			return err
		},
		func(context.Context, []*adaptation.ContainerUpdate) ([]*adaptation.ContainerUpdate, error) {
			return nil, nil
		},
		adaptation.WithSocketPath(filepath.Join(b.dir, "nri.sock")), adaptation.WithPluginPath(b.dir+"/none"), adaptation.WithPluginConfigPath(b.dir+"/none"))
	if err == nil {
		err = r.Start()
	}
	if err != nil {
		b.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() {
		ended <- nri.Run(ctx, nri.Config{Socket: b.socket(), Runtime: filepath.Join(b.dir, "nri.sock"), Index: "90", Wait: 30 * time.Second, Log: slog.New(slog.NewTextHandler(&r.log, nil))})
	}()
	b.t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			b.t.Error(err)
		}
		r.Stop()
		if b.t.Failed() {
			b.t.Log(r.log.String())
		}
	})
	netnstest.Eventually(b.t, time.Minute, func() error {
		if !r.connected.Load() {
			return errors.New("the plugin is not connected")
		}
		return nil
	})
	return r
}

// move moves the devices into the pod, as DRANET does before fared is called, or back.
func (b *bed) move(into bool) {
	b.t.Helper()
	for p := range planes {
		name := fmt.Sprint("v", p)
		if !into {
			b.pod.IP("link", "set", name, "netns", b.Server.Name)
			continue
		}
		b.Server.IP("link", "set", name, "netns", b.pod.Name)
		b.pod.Addr(name, fmt.Sprintf("172.16.%d.9/24", p))
	}
}

// TestNRI follows pods by NRI: the first packet of a container takes its planes, one that started without the agent is
// attached when the agent runs, and nothing is left of a pod that has ended.
func TestNRI(t *testing.T) {
	b := newBed(t, packettap.End)
	b.start()
	b.program()
	r := newNRI(b)
	for round := range 3 {
		absent := round == 1
		if absent {
			b.agent.Kill()
		}
		b.move(true)
		sandbox := &api.PodSandbox{
			Id: fmt.Sprint("box", round), Uid: fmt.Sprint("uid", round), Name: "trainer", Namespace: "ml", Annotations: map[string]string{nri.AttachAnnotation: "true"},
			Linux: &api.LinuxPodSandbox{Namespaces: []*api.LinuxNamespace{{Type: "network", Path: b.pod.Path()}}},
		}
		c := &api.Container{Id: sandbox.Id + "c", PodSandboxId: sandbox.Id, Name: "main"}
		ctx := context.Background()
		if err := r.RunPodSandbox(ctx, &adaptation.RunPodSandboxRequest{Pod: sandbox}); err != nil {
			t.Fatal(err)
		}
		created, err := r.CreateContainer(ctx, &adaptation.CreateContainerRequest{Pod: sandbox, Container: c})
		if err != nil {
			t.Fatal(err)
		}
		if mounts := created.GetAdjust().GetMounts(); absent != (len(mounts) == 0) {
			t.Errorf("mounts %v", mounts)
		}
		if err := r.StartContainer(ctx, &adaptation.StartContainerRequest{Pod: sandbox, Container: c}); err != nil {
			t.Fatal(err)
		}
		if absent {
			b.start()
		} else if before := b.arrived(); b.send(20) != nil {
			t.Error("the container was started before it had routes")
		} else {
			netnstest.Eventually(t, time.Minute, func() error { return all(before, b.arrived(), 20) })
		}
		b.reaches()
		if err := r.StopPodSandbox(ctx, &adaptation.StopPodSandboxRequest{Pod: sandbox}); err != nil {
			t.Fatal(err)
		}
		b.empty()
		if err := r.RemovePodSandbox(ctx, &adaptation.RemovePodSandboxRequest{Pod: sandbox}); err != nil {
			t.Fatal(err)
		}
		b.move(false)
	}
	if text := r.log.String(); strings.Count(text, "pod starts without its planes") != 1 {
		t.Errorf("log:\n%s", text)
	}
}

// all returns an error unless n packets have arrived.
func all(before, now [planes]uint64, n uint64) error {
	var sum uint64
	for p := range planes {
		sum += now[p] - before[p]
	}
	if sum != n {
		return fmt.Errorf("%d of %d packets have arrived", sum, n)
	}
	return nil
}
