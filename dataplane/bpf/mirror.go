package bpf

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
)

// batchSize limits one batch operation of a map.
const batchSize = 4096

// mirror is a hash map in the kernel with its known contents, so that only differences are written.
type mirror[K, V comparable] struct {
	kernel *ebpf.Map
	have   map[K]V
}

// read reads the contents of an adopted map.
func (m *mirror[K, V]) read() error {
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

// set writes the differences.
func (m *mirror[K, V]) set(want map[K]V) error {
	var keys []K
	var values []V
	for k, v := range want {
		if old, ok := m.have[k]; !ok || old != v {
			keys, values = append(keys, k), append(values, v)
		}
	}
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

// remove deletes keys; missing keys are ignored.
func (m *mirror[K, V]) remove(gone []K) error {
	keys := gone[:0:0]
	for _, k := range gone {
		if _, ok := m.have[k]; ok {
			keys = append(keys, k)
			delete(m.have, k)
		}
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

// cells is an array in the kernel with its known contents.
type cells[V comparable] struct {
	kernel *ebpf.Map
	have   []V
}

func (c *cells[V]) read() error {
	c.have = make([]V, c.kernel.MaxEntries())
	for i := range c.have {
		if err := c.kernel.Lookup(uint32(i), &c.have[i]); err != nil {
			return fmt.Errorf("bpf: read map %v: %w", c.kernel, err)
		}
	}
	return nil
}

// set writes a cell if it differs.
func (c *cells[V]) set(i int, v V) error {
	if c.have[i] == v {
		return nil
	}
	if err := c.kernel.Put(uint32(i), &v); err != nil {
		return fmt.Errorf("bpf: write map %v: %w", c.kernel, err)
	}
	c.have[i] = v
	return nil
}

// repair restores the map.
func (m *mirror[K, V]) repair(f *findings) error {
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
	return m.set(want)
}

// repair restores the array.
func (c *cells[V]) repair(f *findings) error {
	for i, want := range c.have {
		var now V
		if err := c.kernel.Lookup(uint32(i), &now); err != nil {
			return fmt.Errorf("bpf: read map %v: %w", c.kernel, err)
		}
		if now == want {
			continue
		}
		f.differs("map %v has a different word", c.kernel)
		c.have[i] = now
		if err := c.set(i, want); err != nil {
			return err
		}
	}
	return nil
}
