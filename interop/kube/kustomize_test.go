package kube

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
)

const base = "../../charts/kustomize"

var update = flag.Bool("update", false, "write the kustomize base from the chart")

// TestBase checks that the kustomize base is what the chart renders.
func TestBase(t *testing.T) {
	const file = base + "/fared.yaml"
	text := "# Rendered from charts/fared: make kustomize\n" + render(t, map[string]any{"existingConfigMap": "fared-nodes"})
	text = strings.ReplaceAll(strings.ReplaceAll(text, "app.kubernetes.io/managed-by: Helm", "app.kubernetes.io/managed-by: kustomize"), "  namespace: "+namespace+"\n", "")
	if *update {
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := os.ReadFile(file); err != nil || string(got) != text {
		t.Errorf("%s is not what the chart renders, %v: make kustomize", file, err)
	}
}

// TestOverlay checks that a site's overlay adds its fabric to the base, and that another configuration makes another
// pod, so that the DaemonSet restarts its pods.
func TestOverlay(t *testing.T) {
	names := map[string]bool{}
	for _, planes := range []string{"2", "4"} {
		dir := t.TempDir()
		absolute, err := filepath.Abs(base)
		if err != nil {
			t.Fatal(err)
		}
		relative, err := filepath.Rel(dir, absolute)
		if err != nil {
			t.Fatal(err)
		}
		for name, text := range map[string]string{
			"kustomization.yaml": "namespace: fared-system\nresources: [" + relative + "]\nimages: [{name: fared, newName: registry.example/fared}]\n" +
				"configMapGenerator:\n- {name: fared-nodes, behavior: merge, files: [fabric.yaml]}\n",
			"fabric.yaml": "name: pod1\nplanes: " + planes + "\n",
		} {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		made, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), dir)
		if err != nil {
			t.Fatal(err)
		}
		text, err := made.AsYaml()
		if err != nil {
			t.Fatal(err)
		}
		all := objects(t, string(text))
		m, d := find[*corev1.ConfigMap](all, ""), find[*appsv1.DaemonSet](all, "fared")
		pod := d.Spec.Template.Spec
		if m.Data["fabric.yaml"] == "" || d.Namespace != "fared-system" || pod.Volumes[0].ConfigMap.Name != m.Name || !strings.HasPrefix(pod.Containers[0].Image, "registry.example/fared:") {
			t.Errorf("%s", text)
		}
		names[m.Name] = true
	}
	if len(names) != 2 {
		t.Errorf("the configurations have the names %v", names)
	}
}
