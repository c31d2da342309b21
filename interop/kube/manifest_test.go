package kube

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	monitoringv1 "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/yaml"
)

// objects decodes manifests strictly: fields that the API lacks, and repeated ones, are errors.
func objects(t *testing.T, text string) (all []runtime.Object) {
	t.Helper()
	s := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{scheme.AddToScheme, monitoringv1.AddToScheme, apiextensionsv1.AddToScheme} {
		if err := add(s); err != nil {
			t.Fatal(err)
		}
	}
	decoder := serializer.NewCodecFactory(s, serializer.EnableStrict).UniversalDeserializer()
	for document := range strings.SplitSeq(text, "\n---\n") {
		o, _, err := decoder.Decode([]byte(document), nil, nil)
		if err != nil {
			t.Fatalf("%v\n%s", err, document)
		}
		all = append(all, o)
	}
	return all
}

// find returns the only object of a type whose name has an ending, nil if there is none.
func find[T interface{ GetName() string }](all []runtime.Object, ending string) (found T) {
	for _, o := range all {
		if o, ok := o.(T); ok && strings.HasSuffix(o.GetName(), ending) {
			found = o
		}
	}
	return found
}

// TestManifests checks what all sets of values have in common: the API knows each field, volumes and mounts agree, and
// no container has more than the privileges of its unit.
func TestManifests(t *testing.T) {
	for name, v := range sets(t) {
		t.Run(name, func(t *testing.T) {
			all := objects(t, render(t, v))
			d := find[*appsv1.DaemonSet](all, "fared")
			if d == nil {
				t.Fatal("no DaemonSet")
			}
			pod := d.Spec.Template.Spec
			if !pod.HostNetwork || pod.HostPID || pod.HostIPC || *pod.AutomountServiceAccountToken {
				t.Errorf("the pod's namespaces: %+v", pod)
			}
			var volumes, mounted []string
			for _, volume := range pod.Volumes {
				volumes = append(volumes, volume.Name)
			}
			for _, c := range slices.Concat(pod.InitContainers, pod.Containers) {
				for _, m := range c.VolumeMounts {
					mounted = append(mounted, m.Name)
				}
				checkPrivileges(t, name, c)
			}
			slices.Sort(volumes)
			slices.Sort(mounted)
			if mounted = slices.Compact(mounted); !slices.Equal(volumes, mounted) {
				t.Errorf("volumes %v, and mounted are %v", volumes, mounted)
			}
			if labels := d.Spec.Template.Labels; labels["app.kubernetes.io/instance"] != d.Spec.Selector.MatchLabels["app.kubernetes.io/instance"] {
				t.Errorf("the selector %v does not match %v", d.Spec.Selector, labels)
			}
		})
	}
}

// checkPrivileges checks a container's privileges.
func checkPrivileges(t *testing.T, set string, c corev1.Container) {
	t.Helper()
	s := c.SecurityContext
	if *s.AllowPrivilegeEscalation || !*s.ReadOnlyRootFilesystem || s.Privileged != nil || !slices.Equal(s.Capabilities.Drop, []corev1.Capability{"ALL"}) {
		t.Errorf("container %s: %+v", c.Name, s)
	}
	var got []string
	for _, capability := range s.Capabilities.Add {
		got = append(got, string(capability))
	}
	agent := []string{"NET_ADMIN", "NET_BROADCAST", "BPF", "PERFMON"}
	switch set {
	case "nodes":
		agent = agent[:2] // driver linux
	case "pods":
		agent = append(agent, "SYS_ADMIN")
	}
	want := map[string][]string{"setup": {"CHOWN", "DAC_OVERRIDE"}, "dataplane": agent, "run": nil, "nri": {"SYS_ADMIN"}}[c.Name]
	root := c.Name != "run" && c.Name != "report" && c.Name != "kube"
	if set == "unnumbered" && c.Name == "run" {
		root, want = true, []string{"NET_RAW"}
	}
	if !slices.Equal(got, want) || (*s.RunAsUser == 0) != root {
		t.Errorf("container %s: user %d with %v, want root: %v, with %v", c.Name, *s.RunAsUser, got, root, want)
	}
}

// program returns a program of the binary under test.
func program(t *testing.T, name string) string {
	t.Helper()
	fared := os.Getenv("FARED_BINARY")
	if fared == "" {
		t.Fatal("FARED_BINARY is not set")
	}
	return filepath.Join(filepath.Dir(fared), name)
}

// run runs a program and returns its output.
func run(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %v: %v\n%s", name, args, err, out)
	}
	return string(out)
}

// TestCommandLines checks that the programs know all commands and flags, probes included.
func TestCommandLines(t *testing.T) {
	for name, v := range sets(t) {
		all := objects(t, render(t, v))
		pod := find[*appsv1.DaemonSet](all, "fared").Spec.Template.Spec
		containers := slices.Concat(pod.InitContainers, pod.Containers)
		if workers := find[*appsv1.StatefulSet](all, "-fleet"); workers != nil {
			containers = append(containers, workers.Spec.Template.Spec.Containers...)
		}
		for _, c := range containers {
			lines := [][]string{slices.Concat(c.Command, c.Args)}
			if c.Lifecycle != nil {
				lines = append(lines, c.Lifecycle.PreStop.Exec.Command)
			}
			for _, p := range []*corev1.Probe{c.LivenessProbe, c.ReadinessProbe} {
				if p != nil && p.Exec != nil {
					lines = append(lines, p.Exec.Command)
				}
			}
			for _, line := range lines {
				if filepath.Dir(line[0]) != "/usr/bin" {
					t.Errorf("%s: the image has no %s", name, line[0])
				}
				words := slices.Concat([]string{"fared"}, line[1:])
				if filepath.Base(line[0]) == "fared-kube" {
					words[0] = "fared-kube"
				}
				if flags := slices.IndexFunc(words, func(w string) bool { return strings.HasPrefix(w, "-") || strings.HasPrefix(w, "/") }); flags >= 0 {
					words = words[:flags]
				}
				help := run(t, program(t, filepath.Base(line[0])), append(line[1:], "--help")...)
				if usage := "Usage:\n  " + strings.Join(words, " ") + " "; !strings.Contains(help+" ", usage) {
					t.Errorf("%s: no %q in\n%s", name, usage, help)
				}
			}
		}
	}
}

// TestConfigurations checks that the pods' first container makes a valid configuration from the ConfigMap for every
// node that has one.
func TestConfigurations(t *testing.T) {
	for name, nodes := range map[string][]string{
		"fabric":     {"gpu-a.example.com", "gpu-b.example.com"},
		"nodes":      {"gpu-a"},
		"unnumbered": {"server1", "server16"},
		"pods":       {"server64"},
		"monitoring": {"server8"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			m := find[*corev1.ConfigMap](objects(t, render(t, sets(t)[name])), "-nodes")
			for file, text := range m.Data {
				if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			for _, node := range nodes {
				out := filepath.Join(t.TempDir(), "fared.yaml")
				run(t, program(t, "fared-lab"), "podsetup", "--nodes", dir, "--node", node, "--out", out, "--metrics-listen", "192.0.2.1:9469")
				run(t, program(t, "fared"), "check", out)
				text, err := os.ReadFile(out)
				if err != nil {
					t.Fatal(err)
				}
				patched := strings.Contains(string(text), "hold_time: 12s") && !strings.Contains(string(text), "restart_time")
				if want := node == "gpu-b.example.com"; patched != want {
					t.Errorf("%s is patched: %v, want %v\n%s", node, patched, want, text)
				}
			}
		})
	}
}

// TestMonitoring checks that rules and dashboard arrive unchanged, and that the pods' ports have the jobs of the rules.
func TestMonitoring(t *testing.T) {
	all := objects(t, render(t, sets(t)["monitoring"]))
	rule, monitor := find[*monitoringv1.PrometheusRule](all, "fared"), find[*monitoringv1.PodMonitor](all, "fared")
	if rule == nil || monitor == nil {
		t.Fatal("an object is missing")
	}
	text, err := os.ReadFile("../../monitoring/fared.rules.yml")
	if err != nil {
		t.Fatal(err)
	}
	var want monitoringv1.PrometheusRuleSpec
	if err := yaml.UnmarshalStrict(text, &want); err != nil {
		t.Fatal(err)
	}
	if len(want.Groups) == 0 || !reflect.DeepEqual(rule.Spec, want) {
		t.Errorf("the rules are\n%+v\nwant\n%+v", rule.Spec, want)
	}
	board, err := os.ReadFile("../../monitoring/fared.dashboard.json")
	if got := find[*corev1.ConfigMap](all, "-dashboard").Data["fared.dashboard.json"]; err != nil || got != string(board) || !json.Valid(board) {
		t.Errorf("the dashboard differs, %v", err)
	}
	jobs := map[string]string{}
	for _, e := range monitor.Spec.PodMetricsEndpoints {
		jobs[*e.Port] = *e.RelabelConfigs[0].Replacement
	}
	for _, c := range find[*appsv1.DaemonSet](all, "fared").Spec.Template.Spec.Containers {
		want := map[string]string{"run": "fared", "dataplane": "fared-agent", "kube": "fared-kube"}[c.Name]
		if len(c.Ports) != 1 || jobs[c.Ports[0].Name] != want {
			t.Errorf("container %s has ports %v, jobs %v", c.Name, c.Ports, jobs)
		}
	}
}

// TestFleet checks that the workers' names are those of the Service's pods, that nodes report to all of them, that they
// may change the ConfigMap of the drains alone, and that no worker is a pod of the DaemonSet.
func TestFleet(t *testing.T) {
	all := objects(t, render(t, sets(t)["fleet"]))
	workers, service := find[*appsv1.StatefulSet](all, "-fleet"), find[*corev1.Service](all, "-fleet")
	nodes := find[*appsv1.DaemonSet](all, "fared")
	var names []string
	for i := range *workers.Spec.Replicas {
		names = append(names, fmt.Sprintf("%s-%d.%s.%s.svc:4798", workers.Name, i, service.Name, workers.Namespace))
	}
	values := func(c corev1.Container, flag string) (all []string) {
		for _, a := range c.Args {
			if value, ok := strings.CutPrefix(a, flag+"="); ok {
				all = append(all, value)
			}
		}
		return all
	}
	worker := workers.Spec.Template.Spec.Containers[0]
	if got := values(worker, "--peer"); !slices.Equal(got, names) || workers.Spec.ServiceName != service.Name {
		t.Errorf("workers name %q, want %q", got, names)
	}
	for _, c := range nodes.Spec.Template.Spec.Containers {
		if c.Name == "report" && !slices.Equal(values(c, "--worker"), append(names, "fleet.example.com:4798")) {
			t.Errorf("nodes report to %q", c.Args)
		}
	}
	rules := find[*rbacv1.Role](all, "-fleet").Rules
	if kept := values(worker, "--configmap"); len(kept) != 1 || kept[0] != workers.Namespace+"/"+rules[1].ResourceNames[0] {
		t.Errorf("drains are kept in %q, rights are %+v", kept, rules)
	}
	if labels.SelectorFromSet(nodes.Spec.Selector.MatchLabels).Matches(labels.Set(workers.Spec.Template.Labels)) || !labels.SelectorFromSet(service.Spec.Selector).Matches(labels.Set(workers.Spec.Template.Labels)) {
		t.Errorf("labels of workers: %v", workers.Spec.Template.Labels)
	}
}
