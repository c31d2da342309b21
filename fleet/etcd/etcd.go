// Package etcd keeps one value in etcd, by the JSON form of its API (etcd 3.4 and later, grpc-gateway at /v3/kv): a
// read and a transaction need no client library, which would bring many dependencies.
package etcd

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"
)

// Key is a key of etcd. It implements drain.Engine.
type Key struct {
	// Endpoints are the URLs of the members, such as http://127.0.0.1:2379.
	Endpoints []string
	Name      string
	Client    *http.Client
}

const (
	// timeout limits a request to one member.
	timeout = 3 * time.Second
	// maxAnswer limits an answer; etcd's own limit of a request is 1.5 MiB.
	maxAnswer = 4 << 20
)

// kv is a key with its value. etcd writes 64-bit numbers as strings, and bytes in base64, as encoding/json does.
type kv struct {
	Value       []byte `json:"value"`
	ModRevision string `json:"mod_revision"`
}

// Load implements drain.Engine. The read is linearizable, as by default.
func (k *Key) Load(ctx context.Context) ([]byte, string, error) {
	var out struct {
		Kvs []kv `json:"kvs"`
	}
	err := errors.New("no endpoint of etcd is given")
	for _, e := range k.Endpoints {
		if err = k.call(ctx, e, "range", map[string]any{"key": []byte(k.Name)}, &out); err == nil {
			break
		}
	}
	if err != nil || len(out.Kvs) == 0 {
		return nil, "", err
	}
	return out.Kvs[0].Value, out.Kvs[0].ModRevision, nil
}

// Store implements drain.Engine. The transaction goes to one member: a repetition after an error could find its own
// result. So a Load comes first, which finds a member that answers.
func (k *Key) Store(ctx context.Context, value []byte, revision string) (bool, error) {
	if revision == "" {
		revision = "0" // etcd's comparison with an absent key
	}
	request := map[string]any{
		"compare": []any{map[string]any{"key": []byte(k.Name), "target": "MOD", "result": "EQUAL", "mod_revision": revision}},
		"success": []any{map[string]any{"request_put": map[string]any{"key": []byte(k.Name), "value": value}}},
	}
	var alive struct{}
	err := errors.New("no endpoint of etcd is given")
	for _, e := range k.Endpoints {
		if err = k.call(ctx, e, "range", map[string]any{"key": []byte(k.Name), "count_only": true}, &alive); err != nil {
			continue
		}
		var out struct {
			Succeeded bool `json:"succeeded"`
		}
		err = k.call(ctx, e, "txn", request, &out)
		return out.Succeeded, err
	}
	return false, err
}

// call makes one request.
func (k *Key) call(ctx context.Context, endpoint, method string, in, out any) error {
	body, err := json.Marshal(in)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, strings.TrimSuffix(endpoint, "/")+"/v3/kv/"+method, bytes.NewReader(body))
	if err != nil {
		return err
	}
	resp, err := k.Client.Do(req)
	if err != nil {
		return fmt.Errorf("etcd: %w", err)
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err != nil {
		return fmt.Errorf("etcd at %s: %w", endpoint, err)
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("etcd at %s: %s: %s", endpoint, resp.Status, bytes.TrimSpace(answer))
	}
	return json.Unmarshal(answer, out)
}
