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

// process is an API server with the files of a directory, which outlive it.
type process struct {
	t               *testing.T
	dir, port, base string
	admin           *apiserver.Client
	run             *exec.Cmd
	ended           chan struct{}
}

// start starts an API server until the test ends, with an administrator's client of it.
func start(t *testing.T) *process {
	t.Helper()
	port := freePort(t)
	p := &process{t: t, dir: credentials(t), port: port, base: "https://127.0.0.1:" + port}
	t.Cleanup(func() { p.kill() })
	p.launch()
	eventually(t, func() error {
		certificate, err := os.ReadFile(filepath.Join(p.dir, "apiserver.crt"))
		if err != nil {
			return err
		}
		return os.WriteFile(filepath.Join(p.dir, "ca.crt"), certificate, 0o600)
	}, p.log)
	p.admin = apiserver.New(p.base, p.dir)
	p.admin.Timeout = time.Minute
	p.ready()
	return p
}

// launch starts the server's process.
func (p *process) launch() {
	p.t.Helper()
	p.run, p.ended = exec.Command(os.Args[0]), make(chan struct{})
	p.run.Env, p.run.Dir = append(os.Environ(), serverVariable+"="+p.dir, serverVariable+"_PORT="+p.port), p.dir
	log, err := os.OpenFile(filepath.Join(p.dir, "log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		p.t.Fatal(err)
	}
	defer log.Close()
	p.run.Stdout, p.run.Stderr = log, log
	if err := p.run.Start(); err != nil {
		p.t.Fatal(err)
	}
	run, ended := p.run, p.ended
	go func() {
		defer close(ended)
		_ = run.Wait()
	}()
}

// kill ends the process.
func (p *process) kill() {
	if p.run != nil {
		_ = p.run.Process.Kill()
		<-p.ended
	}
}

func (p *process) log() string {
	text, _ := os.ReadFile(filepath.Join(p.dir, "log"))
	return string(text)
}

// ready waits until the server answers.
func (p *process) ready() {
	p.t.Helper()
	eventually(p.t, func() error {
		select {
		case <-p.ended:
			p.t.Fatalf("the API server has ended:\n%s", p.log())
		default:
		}
		return p.admin.Do(context.Background(), http.MethodGet, "/api/v1/namespaces/kube-system", "", nil, nil)
	}, p.log)
}

// eventually waits until a check succeeds, at most three minutes.
func eventually(t *testing.T, check func() error, more func() string) {
	t.Helper()
	within(t, 3*time.Minute, check, more)
}

// within is eventually with another limit.
func within(t *testing.T, limit time.Duration, check func() error, more func() string) {
	t.Helper()
	end := time.Now().Add(limit)
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
