//! Buffers that live as long as a session, so that a pass allocates nothing once they have grown.

/// The first `len` elements of `buffer`, grown as needed. Old contents stay.
pub(super) fn fit<T: Copy + Default>(buffer: &mut Vec<T>, len: usize) -> &mut [T] {
    if buffer.len() < len {
        buffer.resize(len, T::default());
    }
    &mut buffer[..len]
}
