//! CUPTI's activity records, read as bytes: a fixed beginning of each by offset. Newer versions only append (checked against the headers
//! of CUDA 12.1 to 13.5), and CUPTI itself steps from record to record, so no version's size matters here.

/// Kinds of records, as CUPTI numbers them (`CUpti_ActivityKind`).
pub(super) mod kind {
    pub const MEMCPY: u32 = 1;
    pub const MEMSET: u32 = 2;
    pub const KERNEL: u32 = 3;
    pub const DRIVER: u32 = 4;
    pub const CONCURRENT_KERNEL: u32 = 10;
    pub const EXTERNAL_CORRELATION: u32 = 39;
}

/// The kind of external correlation that is the engine's (`CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM0`).
pub(super) const CUSTOM: u32 = 3;

/// A piece of a device's work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Work {
    /// ns, by CUPTI's clock; both 0 when it does not know them.
    pub begin: u64,
    pub end: u64,
    pub stream: u32,
    pub correlation: u32,
    /// 0 outside graphs.
    pub node: u64,
    /// Of kernels: grid, block, registers, static and dynamic shared bytes.
    pub launch: Option<KernelShape>,
}

/// How a kernel was launched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct KernelShape {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub registers: u16,
    pub shared_bytes: u32,
}

/// A record that matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Record {
    Work(Work),
    /// The launch `correlation` was made while `id` was pushed.
    External {
        id: u64,
        correlation: u32,
    },
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..at + 2)?.try_into().ok().map(u16::from_le_bytes)
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at + 4)?.try_into().ok().map(u32::from_le_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..at + 8)?.try_into().ok().map(u64::from_le_bytes)
}

/// Reads the record that `bytes`, which may reach beyond it, begin with; `None` of kinds that do not matter and of what is cut off.
pub(super) fn read(bytes: &[u8]) -> Option<Record> {
    match u32_at(bytes, 0)? {
        kind::KERNEL | kind::CONCURRENT_KERNEL => kernel(bytes).map(Record::Work),
        kind::MEMCPY | kind::MEMSET => Some(Record::Work(Work {
            begin: u64_at(bytes, 16)?,
            end: u64_at(bytes, 24)?,
            stream: u32_at(bytes, 40)?,
            correlation: u32_at(bytes, 44)?,
            node: u64_at(bytes, 64)?,
            launch: None,
        })),
        kind::EXTERNAL_CORRELATION if u32_at(bytes, 4)? == CUSTOM => {
            Some(Record::External { id: u64_at(bytes, 8)?, correlation: u32_at(bytes, 16)? })
        }
        _ => None,
    }
}

fn kernel(bytes: &[u8]) -> Option<Work> {
    let three = |at: usize| Some([u32_at(bytes, at)?, u32_at(bytes, at + 4)?, u32_at(bytes, at + 8)?]);
    let shape = KernelShape {
        grid: three(52)?,
        block: three(64)?,
        registers: u16_at(bytes, 6)?,
        shared_bytes: u32_at(bytes, 76)?.saturating_add(u32_at(bytes, 80)?),
    };
    Some(Work {
        begin: u64_at(bytes, 16)?,
        end: u64_at(bytes, 24)?,
        stream: u32_at(bytes, 48)?,
        correlation: u32_at(bytes, 92)?,
        node: u64_at(bytes, 144)?,
        launch: Some(shape),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
        bytes[at..at + value.len()].copy_from_slice(value);
    }

    #[test]
    fn a_kernel_reads_the_same_in_every_versions_size() {
        for size in [208, 216, 224, 232, 248] {
            let mut bytes = vec![0xab_u8; size];
            for (at, value) in [(0, 10_u32), (48, 7), (52, 2), (56, 3), (60, 4), (64, 128), (68, 1), (72, 1), (76, 32), (80, 64), (92, 55)]
            {
                put(&mut bytes, at, &value.to_le_bytes());
            }
            put(&mut bytes, 6, &40_u16.to_le_bytes());
            for (at, value) in [(16, 1000_u64), (24, 3500), (144, 99)] {
                put(&mut bytes, at, &value.to_le_bytes());
            }
            let shape = KernelShape { grid: [2, 3, 4], block: [128, 1, 1], registers: 40, shared_bytes: 96 };
            let work = Work { begin: 1000, end: 3500, stream: 7, correlation: 55, node: 99, launch: Some(shape) };
            assert_eq!(read(&bytes), Some(Record::Work(work)), "{size}");
            assert_eq!(read(&bytes[..100]), None);
        }
    }

    #[test]
    fn copies_and_external_ids_are_read_and_other_kinds_left_out() {
        let mut copy = vec![0_u8; 88];
        for (at, value) in [(0, 1_u32), (40, 3), (44, 8)] {
            put(&mut copy, at, &value.to_le_bytes());
        }
        for (at, value) in [(16, 5_u64), (24, 6), (64, 12)] {
            put(&mut copy, at, &value.to_le_bytes());
        }
        assert_eq!(read(&copy), Some(Record::Work(Work { begin: 5, end: 6, stream: 3, correlation: 8, node: 12, launch: None })));
        let mut external = vec![0_u8; 24];
        for (at, value) in [(0, 39_u32), (4, CUSTOM), (8, 21), (16, 8)] {
            put(&mut external, at, &value.to_le_bytes());
        }
        assert_eq!(read(&external), Some(Record::External { id: 21, correlation: 8 }));
        put(&mut external, 4, &2_u32.to_le_bytes());
        assert_eq!(read(&external), None);
        assert_eq!(read(&9999_u32.to_le_bytes()), None);
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..260), kind in 0_u32..60) {
            let mut bytes = bytes;
            if bytes.len() >= 4 {
                bytes[..4].copy_from_slice(&kind.to_le_bytes());
            }
            let _ = read(&bytes);
        }
    }
}
