package kube

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
)

// nodeState returns the objects of a chart with an option.
func nodeState(t *testing.T, options string) []string {
	t.Helper()
	all := objects(t, render(t, values(t, "existingConfigMap: x\nnodeState: {enabled: true, "+options+"}")))
	var rights []string
	for _, rule := range find[*rbacv1.ClusterRole](all, "").Rules {
		for _, verb := range rule.Verbs {
			rights = append(rights, verb+" "+strings.Join(rule.Resources, ","))
		}
	}
	slices.Sort(rights)
	pod := find[*appsv1.DaemonSet](all, "fared").Spec.Template.Spec
	for _, c := range slices.Concat(pod.InitContainers, pod.Containers) {
		for _, m := range c.VolumeMounts {
			if (m.Name == "token") != (m.MountPath == "/var/run/secrets/kubernetes.io/serviceaccount") || m.Name == "token" && c.Name != "kube" {
				t.Errorf("container %s mounts %+v", c.Name, m)
			}
		}
		if c.Name == "kube" {
			rights = append(rights, fmt.Sprintf("user %d", *c.SecurityContext.RunAsUser))
		}
	}
	if find[*admissionv1.ValidatingAdmissionPolicy](all, "") == nil || find[*admissionv1.ValidatingAdmissionPolicyBinding](all, "") == nil {
		t.Errorf("%s: no policy limits a pod to its node", options)
	}
	if crd := find[*apiextensionsv1.CustomResourceDefinition](all, "farednodestates.fared.io"); crd != nil {
		rights = append(rights, "CRD")
	}
	return rights
}

// TestHold checks that the daemons await the drains of a node that shuts down, within the pod's time, if it drains.
func TestHold(t *testing.T) {
	for on, want := range map[string][]string{"true": {"dataplane 55s", "run 55s"}, "false": nil} {
		all := objects(t, render(t, values(t, "existingConfigMap: x\nterminationGracePeriodSeconds: 60\nnodeState: {enabled: true, drainAtShutdown: "+on+"}")))
		var held []string
		for _, c := range find[*appsv1.DaemonSet](all, "fared").Spec.Template.Spec.Containers {
			if c.Lifecycle != nil {
				_, limit, _ := strings.Cut(strings.Join(c.Lifecycle.PreStop.Exec.Command, " "), "--limit=")
				held = append(held, c.Name+" "+limit)
			}
		}
		if !slices.Equal(held, want) {
			t.Errorf("drainAtShutdown %s holds %q, want %q", on, held, want)
		}
	}
}

// TestRights checks that each option brings the rights that it needs, and no others, and that fared-kube alone has a
// token of the API server.
func TestRights(t *testing.T) {
	least := []string{"create farednodestates", "patch farednodestates/status", "patch nodes/status", "watch nodes"}
	for options, want := range map[string][]string{
		"crd: false": append(slices.Clone(least), "user 64179"),
		"drains: true": {"create farednodestates", "list fareddrains", "patch fareddrains/status", "patch farednodestates/status", "patch nodes/status", "watch fareddrains",
			"watch nodes", "user 64179", "CRD"},
		"drainCordoned: true, drainAtShutdown: true": append(slices.Clone(least), "user 64179", "CRD"),
		"nvsentinel: {enabled: true, user: 7}":       append(slices.Clone(least), "user 7", "CRD"),
		"labels: true":                               append([]string{"create farednodestates", "patch farednodestates/status", "patch nodes"}, append(slices.Clone(least[2:]), "user 64179", "CRD")...),
		"nvsentinel: {enabled: true}, crd: false":    append(slices.Clone(least), "user 0"),
		"taints: {driver: dra.net}, crd: false": {"create devicetaintrules", "create farednodestates", "delete devicetaintrules", "list devicetaintrules", "list resourceslices",
			"patch devicetaintrules", "patch farednodestates/status", "patch nodes/status", "watch nodes", "user 64179"},
	} {
		if got := nodeState(t, options); !slices.Equal(got, want) {
			t.Errorf("%s: %q, want %q", options, got, want)
		}
	}
}
