// Package server runs the program fared-kube and the chart's manifests against a real API server.
package server

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"go.etcd.io/etcd/server/v3/embed"
	"k8s.io/kubernetes/cmd/kube-apiserver/app"

	"github.com/fared/fared/kube/apiserver"
)

// serverVariable makes the test's binary an API server with the files of a directory.
const serverVariable = "FARED_TEST_APISERVER"

func TestMain(m *testing.M) {
	if dir := os.Getenv(serverVariable); dir != "" {
		fmt.Fprintln(os.Stderr, serve(dir, os.Getenv(serverVariable+"_PORT")))
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// serve runs etcd and an API server until the process is killed.
func serve(dir, port string) error {
	c := embed.NewConfig()
	c.Dir, c.LogLevel, c.UnsafeNoFsync = filepath.Join(dir, "data"), "error", true
	socket, peers := url.URL{Scheme: "unix", Host: "etcd"}, url.URL{Scheme: "unix", Host: "peers"} // in the directory of the process
	c.ListenClientUrls, c.AdvertiseClientUrls = []url.URL{socket}, []url.URL{socket}
	c.ListenPeerUrls, c.AdvertisePeerUrls = []url.URL{peers}, []url.URL{peers}
	c.InitialCluster = c.InitialClusterFromName(c.Name)
	etcd, err := embed.StartEtcd(c)
	if err != nil {
		return err
	}
	<-etcd.Server.ReadyNotify()
	server := app.NewAPIServerCommand()
	server.SetArgs([]string{
		"--etcd-servers=" + socket.String(), "--bind-address=127.0.0.1", "--secure-port=" + port, "--advertise-address=192.0.2.1", "--endpoint-reconciler-type=none",
		"--cert-dir=" + dir, "--token-auth-file=" + filepath.Join(dir, "tokens.csv"), "--authorization-mode=RBAC", "--service-cluster-ip-range=10.0.0.0/24",
		"--service-account-issuer=https://fared.test", "--service-account-key-file=" + filepath.Join(dir, "key"), "--service-account-signing-key-file=" + filepath.Join(dir, "key"),
		"--v=0",
	})
	return server.Execute()
}

// credentials returns a directory with the server's key of tokens and the administrator's token.
func credentials(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string][]byte{
		"key": pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}), "tokens.csv": []byte("secret,admin,1,system:masters\n"), "token": []byte("secret"),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// freePort returns a port of 127.0.0.1 that no program has now.
func freePort(t *testing.T) string {
	t.Helper()
	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer free.Close()
	_, port, _ := net.SplitHostPort(free.Addr().String())
	return port
}

// start starts an API server until the test ends, and returns an administrator's client of it.
func start(t *testing.T) (admin *apiserver.Client, base, dir string) {
	t.Helper()
	dir = credentials(t)
	port := freePort(t)
	server := exec.Command(os.Args[0])
	server.Env = append(os.Environ(), serverVariable+"="+dir, serverVariable+"_PORT="+port)
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		t.Fatal(err)
	}
	server.Stdout, server.Stderr = log, log
	server.Dir = dir
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = server.Wait()
	}()
	t.Cleanup(func() {
		_ = server.Process.Kill()
		<-ended
	})
	base = "https://127.0.0.1:" + port
	logged := func() string {
		text, _ := os.ReadFile(log.Name())
		return string(text)
	}
	eventually(t, func() error {
		select {
		case <-ended:
			t.Fatalf("the API server has ended:\n%s", logged())
		default:
		}
		if certificate, err := os.ReadFile(filepath.Join(dir, "apiserver.crt")); err != nil {
			return err
		} else if err := os.WriteFile(filepath.Join(dir, "ca.crt"), certificate, 0o600); err != nil {
			return err
		}
		admin = apiserver.New(base, dir)
		admin.Timeout = time.Minute
		return admin.Do(context.Background(), http.MethodGet, "/api/v1/namespaces/kube-system", "", nil, nil)
	}, logged)
	return admin, base, dir
}

// eventually waits until a check succeeds, at most three minutes.
func eventually(t *testing.T, check func() error, more func() string) {
	t.Helper()
	end := time.Now().Add(3 * time.Minute)
	for {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%v\n%s", err, more())
		}
		time.Sleep(50 * time.Millisecond)
	}
}
