package server

import (
	"context"
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	mathrand "math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"

	"github.com/fared/fared/fleet/configmap"
	"github.com/fared/fared/fleet/drain"
	"github.com/fared/fared/kube/apiserver"
	"github.com/fared/fared/topo"
)

const fleetAccount = "/fared-fleet"

// newFleet starts an API server with the rights of the chart's workers.
func newFleet(t *testing.T) *cluster {
	t.Helper()
	c := &cluster{process: start(t), account: t.TempDir()}
	c.must(http.MethodPost, "/api/v1/namespaces", object{"metadata": object{"name": namespace}}, nil)
	for document := range strings.SplitSeq(render(t, "fleet.yaml")["fared/templates/fleet.yaml"], "\n---") {
		for _, kind := range []string{"ServiceAccount", "Role", "RoleBinding"} {
			if strings.Contains(document, "\nkind: "+kind+"\n") {
				c.apply(document)
			}
		}
	}
	return c
}

// worker returns the drains as a worker of its own has them, and writes a token of the workers' account.
func (c *cluster) worker(f *topo.Fabric) *drain.Book {
	c.t.Helper()
	c.account = c.t.TempDir()
	c.write("ca.crt", c.file("ca.crt"))
	c.renew()
	return &drain.Book{Engine: &configmap.Object{API: apiserver.New(c.base, c.account), Namespace: namespace, Name: "fared-fleet-drains"},
		Fabric: f, Budget: drain.Budget{Planes: f.Planes - 1}, Present: func() []string { return nil }, Now: time.Now}
}

// renew writes a new token, as the kubelet does.
func (c *cluster) renew() {
	c.t.Helper()
	var request struct{ Status struct{ Token string } }
	c.must(http.MethodPost, paths["ServiceAccount"]+fleetAccount+"/token", object{"spec": object{}}, &request)
	c.write("token", request.Status.Token)
}

// ending writes a token that the API server accepts for some seconds more: it allows clocks to differ by a minute. The
// shortest that it makes itself lasts ten.
func (c *cluster) ending() {
	c.t.Helper()
	var account struct{ Metadata struct{ UID string } }
	c.must(http.MethodGet, paths["ServiceAccount"]+fleetAccount, nil, &account)
	block, _ := pem.Decode([]byte(c.file("key")))
	key, err := x509.ParseECPrivateKey(block.Bytes)
	if err != nil {
		c.t.Fatal(err)
	}
	now := time.Now().Unix()
	var text []string
	for _, part := range []object{{"alg": "ES256", "typ": "JWT"}, {"iss": "https://fared.test", "aud": []string{"https://fared.test"}, "iat": now - 3600, "nbf": now - 3600, "exp": now - 56,
		"sub":           "system:serviceaccount:" + namespace + ":fared-fleet",
		"kubernetes.io": object{"namespace": namespace, "serviceaccount": object{"name": "fared-fleet", "uid": account.Metadata.UID}}}} {
		b, _ := json.Marshal(part)
		text = append(text, base64.RawURLEncoding.EncodeToString(b))
	}
	sum := sha256.Sum256([]byte(strings.Join(text, ".")))
	r, s, err := ecdsa.Sign(rand.Reader, key, sum[:])
	if err != nil {
		c.t.Fatal(err)
	}
	signature := append(r.FillBytes(make([]byte, 32)), s.FillBytes(make([]byte, 32))...)
	c.write("token", strings.Join(append(text, base64.RawURLEncoding.EncodeToString(signature)), "."))
}

// operation is a drain of a leaf, its end, or a list; list has a negative leaf.
type operation struct {
	leaf    int
	release bool
}

// outcome is the result of an operation; it is unknown after an error other than a refusal.
type outcome struct {
	ok, unknown bool
	leaves      int // of a list, as bits
}

// meaning is the sequential meaning of operations on three leaves, of which one may be drained.
var meaning = porcupine.NondeterministicModel{
	Init: func() []any { return []any{0} },
	Step: func(state, input, output any) []any {
		drained, r, out := state.(int), input.(operation), output.(outcome)
		if r.leaf < 0 {
			if out.leaves != drained {
				return nil
			}
			return []any{drained}
		}
		bit := 1 << r.leaf
		may, after := drained&^bit == 0, drained|bit
		if r.release {
			may, after = drained&bit != 0, drained&^bit
		}
		switch {
		case out.unknown && may:
			return []any{drained, after}
		case out.unknown || !out.ok && !may:
			return []any{drained}
		case out.ok && may:
			return []any{after}
		}
		return nil
	},
}

// history is the operations of all operators.
type history struct {
	mu      sync.Mutex
	all     []porcupine.Operation
	unknown []int // indexes
	begun   time.Time
}

// do makes one operation of an operator. One that the API server has refused, or that has not reached it, is none.
func (h *history) do(ctx context.Context, b *drain.Book, operator int, r operation) error {
	called := time.Since(h.begun)
	var out outcome
	var err error
	switch {
	case r.leaf < 0:
		var all drain.Record
		all, err = b.Load(ctx)
		for _, d := range all.Drains {
			out.leaves |= 1 << (d.Part[len(d.Part)-1] - '0')
		}
	case r.release:
		err = b.Release(ctx, fmt.Sprintf("leaf%d", r.leaf))
	default:
		err = b.Grant(ctx, drain.Drain{Part: fmt.Sprintf("leaf%d", r.leaf)})
	}
	var refusal *drain.Refusal
	if errors.As(err, &refusal) || errors.Is(err, drain.ErrUnknown) {
		err = nil
	} else {
		out.ok = err == nil
	}
	if err != nil && (r.leaf < 0 || apiserver.Refused(err)) {
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if out.unknown = err != nil; out.unknown {
		h.unknown = append(h.unknown, len(h.all))
	}
	h.all = append(h.all, porcupine.Operation{ClientId: operator, Input: r, Output: out, Call: int64(called), Return: int64(time.Since(h.begun))})
	return err
}

// decided notes that the unknown effects have happened or never will: the API server that had the calls has ended.
func (h *history) decided() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, i := range h.unknown {
		h.all[i].Return = int64(time.Since(h.begun))
	}
	h.unknown = nil
}

// TestFleetDrains lets three workers with the rights of the chart drain and release leaves at once, while the API
// server is killed: some order of all operations explains their results, so the last plane is granted once. A token
// that expires ends the changes, and a new one lets them go on.
func TestFleetDrains(t *testing.T) {
	c := newFleet(t)
	f, err := topo.New(topo.Spec{Planes: 3, Servers: 2, SubPorts: 1})
	if err != nil {
		t.Fatal(err)
	}
	h := &history{begun: time.Now()}
	var made atomic.Int64
	var operators sync.WaitGroup
	ctx, cancel := context.WithCancel(t.Context())
	for i := range 3 {
		b, random := c.worker(f), mathrand.New(mathrand.NewPCG(7, uint64(i)))
		operators.Go(func() {
			for ctx.Err() == nil {
				r := operation{random.IntN(f.Planes+1) - 1, random.IntN(2) == 0}
				if err := h.do(context.Background(), b, i, r); err != nil {
					time.Sleep(50 * time.Millisecond) // between attempts
					continue
				}
				made.Add(1)
			}
		})
	}
	more := func(n int64) {
		t.Helper()
		want := made.Load() + n
		eventually(t, func() error {
			if now := made.Load(); now < want {
				return fmt.Errorf("%d operations, want %d", now, want)
			}
			return nil
		}, c.log)
	}
	more(150)
	for range 3 {
		c.kill()
		time.Sleep(200 * time.Millisecond) // operators meet its absence
		h.decided()
		c.launch()
		more(100)
	}
	cancel()
	operators.Wait()
	h.decided()
	b := c.worker(f)
	if err := h.do(t.Context(), b, 3, operation{leaf: -1}); err != nil {
		t.Fatal(err)
	}
	granted, unknown := 0, 0
	for _, x := range h.all {
		if x.Output.(outcome).unknown {
			unknown++
		} else if r := x.Input.(operation); x.Output.(outcome).ok && r.leaf >= 0 && !r.release {
			granted++
		}
	}
	if result := porcupine.CheckOperationsTimeout(meaning.ToModel(), h.all, time.Minute); result != porcupine.Ok || granted == 0 {
		t.Errorf("%v: no order explains %d operations, %d grants", result, len(h.all), granted)
	}
	t.Logf("%d operations, %d grants, %d of unknown effect", len(h.all), granted, unknown)

	for leaf := range f.Planes {
		if err := b.Release(t.Context(), fmt.Sprintf("leaf%d", leaf)); err != nil && !errors.Is(err, drain.ErrUnknown) {
			t.Fatal(err)
		}
	}
	c.ending()
	if err := b.Grant(t.Context(), drain.Drain{Part: "leaf1", Reason: "0"}); err != nil {
		t.Fatalf("before the token's end: %v", err)
	}
	n := 0
	eventually(t, func() error {
		if err := b.Grant(t.Context(), drain.Drain{Part: "leaf1", Reason: fmt.Sprint(n + 1)}); err != nil {
			if !apiserver.Is(err, http.StatusUnauthorized) {
				t.Errorf("after the token's end: %v", err)
			}
			return nil
		}
		n++
		return errors.New("the token does not expire")
	}, c.log)
	if err := b.Release(t.Context(), "leaf1"); !apiserver.Is(err, http.StatusUnauthorized) {
		t.Errorf("a drain ends without a token: %v", err)
	}
	c.renew()
	if all, err := b.Load(t.Context()); err != nil || len(all.Drains) != 1 || all.Drains[0].Part != "leaf1" || all.Drains[0].Reason != fmt.Sprint(n) {
		t.Errorf("with a new token %+v, %v; want change %d", all, err, n)
	}
	if err := b.Release(t.Context(), "leaf1"); err != nil {
		t.Error(err)
	}
	other := &configmap.Object{API: apiserver.New(c.base, c.account), Namespace: namespace, Name: "fared-config"}
	if _, _, err := other.Load(t.Context()); !apiserver.Is(err, http.StatusForbidden) {
		t.Errorf("another ConfigMap is read: %v", err)
	}
}
