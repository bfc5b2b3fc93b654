"""All tests of this folder compute with one thread, and collect only garbage of their own."""

from tests.thrift import thrift as thrift
