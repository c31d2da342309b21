package config

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/fared/fared/wecmp"
)

func TestHasher(t *testing.T) {
	for _, test := range []struct {
		hash Hash
		want wecmp.Hasher
	}{
		{Hash{Algorithm: HashDataplane}, nil},
		{Hash{Algorithm: HashUniform}, nil},
		{Hash{Algorithm: HashLinux, Seed: 7, Buckets: 256}, wecmp.LinuxL4{Seed: 7, Buckets: 256}},
		{Hash{Algorithm: HashCRC16, Seed: 7}, wecmp.CRC16{Seed: 7}},
		{Hash{Algorithm: HashCRC16Bisync}, wecmp.CRC16{Bisync: true}},
		{Hash{Algorithm: HashCRC32, Seed: 7}, wecmp.CRC32{Seed: 7}},
		{Hash{Algorithm: HashXOR}, wecmp.XOR{}},
		{Hash{Algorithm: HashToeplitz}, wecmp.Toeplitz{}},
		{Hash{Algorithm: HashToeplitz, Key: "6d5aFF"}, wecmp.Toeplitz{Key: []byte{0x6d, 0x5a, 0xff}}},
	} {
		if diff := cmp.Diff(test.want, test.hash.Hasher()); diff != "" {
			t.Errorf("%+v (-want +got):\n%s", test.hash, diff)
		}
	}
}
