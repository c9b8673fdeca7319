//! What every reported number is: the report's structs and how units are shown.
