// Package kube tests charts/fared with Helm's libraries and the types of Kubernetes' API. It is a separate module, so
// that fared depends on neither; charts.TestKube runs it.
package kube
