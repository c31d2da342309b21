package bpf

import (
	"errors"
	"fmt"
	"iter"
	"maps"

	"github.com/cilium/ebpf"
)

// batchSize limits one batch operation of a map.
const batchSize = 4096

// bpfMap is the part of ebpf.Map that writes and reads entries; tests replace it.
type bpfMap interface {
	BatchLookup(cursor *ebpf.MapBatchCursor, keys, values any, options *ebpf.BatchOptions) (int, error)
	BatchUpdate(keys, values any, options *ebpf.BatchOptions) (int, error)
	BatchDelete(keys any, options *ebpf.BatchOptions) (int, error)
	Put(key, value any) error
	MaxEntries() uint32
}

// hashMap is a hash map in the kernel with its known contents, so that only differences are written.
type hashMap[K, V comparable] struct {
	kernel bpfMap
	have   map[K]V
}

// read reads the contents of an adopted map.
func (m *hashMap[K, V]) read() error {
	m.have = map[K]V{}
	keys, values := make([]K, batchSize), make([]V, batchSize)
	var cursor ebpf.MapBatchCursor
	for {
		n, err := m.kernel.BatchLookup(&cursor, keys, values, nil)
		if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("bpf: read map %v: %w", m.kernel, err)
		}
		for i := range n {
			m.have[keys[i]] = values[i]
		}
		if err != nil {
			return nil
		}
	}
}

// missing returns the entries of want that the map lacks, or has with another value.
func (m *hashMap[K, V]) missing(want map[K]V) (keys []K, values []V) {
	for k, v := range want {
		if old, ok := m.have[k]; !ok || old != v {
			keys, values = append(keys, k), append(values, v)
		}
	}
	return keys, values
}

// surplus returns the touched keys that the map has and that are not wanted; with all, every key that is not wanted.
func (m *hashMap[K, V]) surplus(want map[K]V, touched iter.Seq[K], all bool) (gone []K) {
	if all {
		touched = maps.Keys(m.have)
	}
	for k := range touched {
		if _, ok := want[k]; !ok {
			if _, ok := m.have[k]; ok {
				gone = append(gone, k)
			}
		}
	}
	return gone
}

// put writes entries.
func (m *hashMap[K, V]) put(keys []K, values []V) error {
	for len(keys) > 0 {
		n := min(len(keys), batchSize)
		done, err := m.kernel.BatchUpdate(keys[:n], values[:n], nil)
		for i := range min(done, n) {
			m.have[keys[i]] = values[i]
		}
		if err != nil {
			return fmt.Errorf("bpf: write map %v: %w", m.kernel, err)
		}
		keys, values = keys[n:], values[n:]
	}
	return nil
}

// remove deletes keys; a key that another program has deleted is not an error.
func (m *hashMap[K, V]) remove(keys []K) error {
	for _, k := range keys {
		delete(m.have, k)
	}
	for len(keys) > 0 {
		n := min(len(keys), batchSize)
		if done, err := m.kernel.BatchDelete(keys[:n], nil); errors.Is(err, ebpf.ErrKeyNotExist) {
			n = min(done+1, n) // another program deleted it
		} else if err != nil {
			return fmt.Errorf("bpf: delete from map %v: %w", m.kernel, err)
		}
		keys = keys[n:]
	}
	return nil
}

// arrayMap is an array in the kernel with its known contents.
type arrayMap[V comparable] struct {
	kernel bpfMap
	have   []V
}

func (a *arrayMap[V]) read() (err error) {
	a.have, err = readWords[V](a.kernel)
	return err
}

// readWords returns the words of an array from few system calls.
func readWords[V any](m bpfMap) ([]V, error) {
	words := make([]V, m.MaxEntries())
	keys := make([]uint32, len(words))
	var cursor ebpf.MapBatchCursor
	for at := 0; at < len(words); {
		n, err := m.BatchLookup(&cursor, keys[at:], words[at:], nil)
		if at += n; err != nil && at < len(words) {
			return nil, fmt.Errorf("bpf: read map %v: %w", m, err)
		}
	}
	return words, nil
}

// set writes a cell if it differs.
func (a *arrayMap[V]) set(i int, v V) error {
	if a.have[i] == v {
		return nil
	}
	if err := a.kernel.Put(uint32(i), &v); err != nil {
		return fmt.Errorf("bpf: write map %v: %w", a.kernel, err)
	}
	a.have[i] = v
	return nil
}

// repair restores the map.
func (m *hashMap[K, V]) repair(f *findings) error {
	want := m.have
	if err := m.read(); err != nil {
		m.have = want
		return err
	}
	var extra []K
	for k := range m.have {
		if _, ok := want[k]; !ok {
			f.differs("map %v has an unexpected entry", m.kernel)
			extra = append(extra, k)
		}
	}
	for k, v := range want {
		if now, ok := m.have[k]; !ok || now != v {
			f.differs("map %v lacks an entry, or has a different one", m.kernel)
		}
	}
	if err := m.remove(extra); err != nil {
		return err
	}
	return m.put(m.missing(want))
}

// repair restores the array.
func (a *arrayMap[V]) repair(f *findings) error {
	words, err := readWords[V](a.kernel)
	if err != nil {
		return err
	}
	for i, want := range a.have {
		if words[i] == want {
			continue
		}
		f.differs("map %v has a different word", a.kernel)
		a.have[i] = words[i]
		if err := a.set(i, want); err != nil {
			return err
		}
	}
	return nil
}
