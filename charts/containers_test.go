package charts

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/fared/fared/internal/testkit/binary"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// container is the part of a container that the tests read.
type container struct {
	Name            string
	Command, Args   []string
	Env             []struct{ Name, Value string }
	VolumeMounts    []mount                                   `yaml:"volumeMounts"`
	LivenessProbe   struct{ Exec struct{ Command []string } } `yaml:"livenessProbe"`
	SecurityContext struct {
		RunAsUser    int `yaml:"runAsUser"`
		RunAsGroup   int `yaml:"runAsGroup"`
		Capabilities struct{ Add []string }
	} `yaml:"securityContext"`
}

type mount struct {
	Name     string
	Path     string `yaml:"mountPath"`
	ReadOnly bool   `yaml:"readOnly"`
}

// pod is the part of a pod that the tests read.
type pod struct {
	InitContainers []container `yaml:"initContainers"`
	Containers     []container
	Volumes        []struct {
		Name     string
		HostPath struct{ Path string } `yaml:"hostPath"`
	}
}

// base returns the pod of the kustomize base.
func base(t *testing.T) pod {
	t.Helper()
	var set struct {
		Spec struct{ Template struct{ Spec pod } }
	}
	if err := yaml.Unmarshal([]byte(read(t, "kustomize/fared.yaml")), &set); err != nil {
		t.Fatal(err)
	}
	return set.Spec.Template.Spec
}

// node is a node of Kubernetes, as far as the pod depends on it: a network namespace, and directories.
type node struct {
	t    *testing.T
	name string // of the container whose network namespace is the node's
	dir  string // has a directory for each volume
	pod  pod
}

const image = "fared:local"

// newNode makes a node with a sub-port in each of two planes, whose configuration is that of server1 of a fabric.
func newNode(t *testing.T) *node {
	t.Helper()
	n := &node{t: t, name: fmt.Sprintf("fared-chart-%d", os.Getpid()), dir: t.TempDir(), pod: base(t)}
	n.docker("run", "--detach", "--name", n.name, "--network", "none", "--cap-add", "NET_ADMIN", "--volume", binary.Fared(t)+":/usr/bin/fared:ro", image,
		"supervise", "--", "dataplane", "--driver", "memory", "--socket", "/tmp/s", "--journal", "none")
	t.Cleanup(func() { n.docker("rm", "--force", n.name) })
	pid := n.docker("inspect", "--format", "{{.State.Pid}}", n.name)
	for _, line := range []string{
		"link add p0.0 type veth peer q0", "address add 10.0.1.0/31 dev p0.0", "link set p0.0 up", "link set q0 up",
		"link add p1.0 type veth peer q1", "address add 10.0.2.0/31 dev p1.0", "link set p1.0 up", "link set q1 up",
		"address add 10.255.0.1/32 dev lo", "link set lo up",
	} {
		if out, err := exec.Command("nsenter", append([]string{"--target", pid, "--net", "ip"}, strings.Fields(line)...)...).CombinedOutput(); err != nil {
			t.Fatalf("ip %s: %v\n%s", line, err, out)
		}
	}
	for _, v := range n.pod.Volumes {
		if err := os.Mkdir(filepath.Join(n.dir, v.Name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for file, text := range map[string]string{"fabric.yaml": "name: pod1\nplanes: 2\nservers: 2\nsub_ports: 1\nleaf: frr\n", "servers.yaml": "gpu-a: server1\n"} {
		if err := os.WriteFile(filepath.Join(n.dir, "nodes", file), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return n
}

// docker calls Docker and returns its output.
func (n *node) docker(args ...string) string {
	n.t.Helper()
	out, err := exec.Command("docker", args...).CombinedOutput()
	if err != nil {
		n.t.Fatalf("docker %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return strings.TrimSpace(string(out))
}

// start runs a container as the kubelet does. Driver linux is used, for the Docker of a machine without CAP_BPF.
func (n *node) start(c container, options ...string) {
	n.t.Helper()
	s := c.SecurityContext
	args := append([]string{"run", "--name", n.name + "-" + c.Name, "--network", "container:" + n.name, "--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges",
		"--user", fmt.Sprintf("%d:%d", s.RunAsUser, s.RunAsGroup), "--volume", binary.Fared(n.t) + ":/usr/bin/fared:ro", "--volume", binary.Lab(n.t) + ":/usr/bin/fared-lab:ro"}, options...)
	for _, capability := range s.Capabilities.Add {
		if capability != "BPF" && capability != "PERFMON" {
			args = append(args, "--cap-add", capability)
		}
	}
	for _, m := range c.VolumeMounts {
		source := filepath.Join(n.dir, m.Name)
		for _, v := range n.pod.Volumes {
			if v.Name == m.Name && (strings.HasPrefix(v.HostPath.Path, "/proc/") || strings.HasPrefix(v.HostPath.Path, "/sys/")) {
				source = v.HostPath.Path
			}
		}
		if m.ReadOnly {
			m.Path += ":ro"
		}
		args = append(args, "--volume", source+":"+m.Path)
	}
	args = append(args, "--entrypoint", c.Command[0], image)
	expand := strings.NewReplacer("$(NODE_NAME)", "gpu-a", "$(HOST_IP)", "127.0.0.1", "--driver=auto", "--driver=linux")
	for _, arg := range slices.Concat(c.Command[1:], c.Args) {
		args = append(args, expand.Replace(arg))
	}
	n.docker(args...)
}

// exec runs a command in a container and returns its output.
func (n *node) exec(name string, args ...string) (string, error) {
	out, err := exec.Command("docker", append([]string{"exec", n.name + "-" + name, "/usr/bin/fared"}, args...)...).CombinedOutput()
	return string(out), err
}

// up runs the pod until the control plane has connected to the agent.
func (n *node) up() {
	n.t.Helper()
	for _, c := range n.pod.InitContainers {
		n.start(c, "--rm")
	}
	for _, c := range n.pod.Containers {
		n.start(c, "--detach")
		n.t.Cleanup(func() { _ = exec.Command("docker", "rm", "--force", n.name+"-"+c.Name).Run() })
	}
	netnstest.Eventually(n.t, time.Minute, func() error {
		out, err := n.exec("run", "status")
		if err == nil && !strings.Contains(out, "connected linux") {
			err = fmt.Errorf("the agent is not connected")
		}
		if err != nil {
			logs, _ := exec.Command("docker", "logs", n.name+"-dataplane").CombinedOutput()
			return fmt.Errorf("%w\n%s\n%s", err, out, logs)
		}
		return nil
	})
}

// down ends the pod by SIGTERM.
func (n *node) down() {
	n.t.Helper()
	for _, c := range n.pod.Containers {
		name := n.name + "-" + c.Name
		n.docker("stop", "--time", "60", name)
		if code := n.docker("inspect", "--format", "{{.State.ExitCode}}", name); code != "0" {
			n.t.Errorf("container %s has ended with %s:\n%s", c.Name, code, n.docker("logs", name))
		}
		n.docker("rm", name)
	}
}

// TestContainers runs the pod under Docker, with the users, capabilities and mounts of the base: the agent sets sysctls
// and the control plane connects; the agent's liveness probe and operators' commands work; a second pod keeps drains
// and takes over files of another user's control plane.
func TestContainers(t *testing.T) {
	gate.Slow(t, gate.Containers, "starts containers")
	netnstest.Require(t, "docker", "nsenter")
	if out, err := exec.Command("docker", "image", "inspect", image).CombinedOutput(); err != nil {
		netnstest.Lacks(t, fmt.Sprintf("the image %s is not there, 'make images' makes it: %v: %s", image, err, out))
	}
	n := newNode(t)
	n.up()
	commands := map[string][]string{"run": {"drain", "plane", "p1", "--force"}}
	for _, c := range n.pod.Containers {
		if probe := c.LivenessProbe.Exec.Command; probe != nil {
			commands[c.Name] = probe[1:]
		}
	}
	for name, command := range commands {
		if out, err := n.exec(name, command...); err != nil || len(commands) != 2 {
			t.Errorf("fared %v in container %s: %v\n%s", command, name, err, out)
		}
	}
	n.down()
	for _, volume := range []string{"run", "state"} { // as after a control plane of the package
		if out, err := exec.Command("chown", "-hR", "977:977", filepath.Join(n.dir, volume)).CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
	}
	if err := os.Chmod(filepath.Join(n.dir, "state"), 0o700); err != nil {
		t.Fatal(err)
	}
	n.up()
	if out, err := n.exec("run", "planes"); err != nil || !strings.Contains(out, "drain") {
		t.Errorf("the drain is lost, %v:\n%s", err, out)
	}
	n.down()
}
