// Package kube tests charts/fared with Helm's libraries and the types of Kubernetes' API, and package server fared-kube
// with an API server. It is a separate module, so that fared depends on neither; charts.TestKube runs it.
package kube
